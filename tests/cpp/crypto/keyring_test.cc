#include "crypto/keyring.h"

#include <string>

#include "base/error.h"
#include "check.h"

namespace moolink::crypto {

namespace {

Key job_key(int byte) {
  Key key;
  key.secret.fill(static_cast<std::byte>(byte));
  return key;
}

}  // namespace

// Computed with Python's hmac: who changes a derivation locks out the peers of yesterday.
TEST("keyring: derived keys and ids are what they were") {
  CHECK_EQ(job_key(7).id(), std::string("10427a0314bef91b"));
  CHECK_EQ(job_key(7).of_group("pong").identity(), std::string("moolink1:80083ae5e49017f6:pong"));
  CHECK(job_key(7).secret_for("challenge") != job_key(7).secret_for("tls"));
}

TEST("keyring: an identity tells nothing of the secret, and tells keys and scopes apart") {
  const Key key = job_key(7);
  CHECK(key.identity() != job_key(8).identity());
  Key scopeless = key.of_group("pong");
  scopeless.scope.clear();
  CHECK(scopeless.identity() != key.of_group("pong").identity());
  CHECK(key.of_group("a").secret != key.of_group("b").secret);
  CHECK(key.of_group("a").secret != key.secret);
}

TEST("keyring: the token finds each group's key, a group's key only its own") {
  const Key token = job_key(7);
  const Keyring broker({token});
  const Keyring of_a({token.of_group("a")});
  const Keyring of_b({token.of_group("b")});
  CHECK(broker.find(token.identity()) == token);
  CHECK(broker.find(of_a.identities().front()) == token.of_group("a"));
  CHECK(of_a.find(of_a.identities().front()) == token.of_group("a"));
  CHECK(!of_a.find(of_b.identities().front()));
  CHECK(!of_a.find(token.identity()));
  CHECK(!broker.find(job_key(8).identity()));
  CHECK(!broker.find(job_key(8).of_group("a").identity()));
  // A group's key opens no group of the same name below it.
  CHECK(!of_a.find(token.of_group("a").of_group("a").identity()));
}

TEST("keyring: all keys are accepted, the first is shown") {
  const Keyring both({job_key(2), job_key(1)});
  const Keyring old({job_key(1)});
  CHECK_EQ(both.identities().front(), job_key(2).identity());
  CHECK(both.find(old.identities().front()) == job_key(1));
  CHECK(both.find(job_key(1).of_group("a").identity()) == job_key(1).of_group("a"));
  CHECK(!old.find(both.identities().front()));
  CHECK(Keyring().empty());
  CHECK(!Keyring().find(job_key(1).identity()));
}

TEST("keyring: what is no identity finds nothing") {
  const Keyring ring({job_key(1)});
  const std::string good = job_key(1).identity();
  for (const std::string& bad :
       {std::string(), std::string("moolink1:"), good.substr(1), good.substr(0, good.size() - 1),
        "moolink2" + good.substr(8), good + "\n", good + std::string(2000, 'x'),
        std::string("moolink1:0123456789ABCDEF:")}) {
    CHECK(!ring.find(bad));
    CHECK(!scope_of(bad));
  }
  CHECK_EQ(*scope_of(good), std::string());
  CHECK_EQ(*scope_of(job_key(1).of_group("a:b").identity()), std::string("a:b"));
  CHECK_EQ(describe_identity(job_key(1).of_group("a").identity()),
           "key " + job_key(1).of_group("a").id() + " of group 'a'");
}

TEST("keyring: too many keys, of several scopes, and scopes that are no names") {
  CHECK_THROWS(Keyring(std::vector<Key>(Keyring::kMaxKeys + 1, job_key(1))),
               ErrorCode::invalid_argument);
  CHECK_THROWS(Keyring({job_key(1), job_key(1).of_group("a")}), ErrorCode::invalid_argument);
  CHECK_THROWS(Keyring({job_key(1).of_group("a\nb")}), ErrorCode::invalid_argument);
  CHECK_EQ(Keyring({job_key(1).of_group("a"), job_key(2).of_group("a")}).scope(), std::string("a"));
}

}  // namespace moolink::crypto
