#include "rpc/authenticator.h"

#include <span>
#include <utility>

namespace moolink::rpc {

namespace {

using crypto::Bytes;
using crypto::Digest;
using crypto::Key;

enum class Side : std::uint8_t { dialler, acceptor };

void append(std::vector<std::byte>& to, Bytes bytes) {
  std::uint64_t size = bytes.size();
  for (int i = 0; i < 8; ++i, size >>= 8) to.push_back(static_cast<std::byte>(size));
  to.insert(to.end(), bytes.begin(), bytes.end());
}

// Every field of a greeting except the proof itself.
void append(std::vector<std::byte>& to, wire::Hello greeting) {
  greeting.proof.clear();
  append(to, wire::encode(greeting).span());
}

Digest proof_of(const Key& key, Side side, const wire::Channel& channel, const wire::Hello& dialler,
                const wire::Hello& acceptor) {
  const bool dials = side == Side::dialler;
  std::vector<std::byte> message;
  append(message, crypto::bytes_of(dials ? "moolink 1 dialler" : "moolink 1 acceptor"));
  message.push_back(static_cast<std::byte>(channel.path));
  append(message, channel.binding);
  append(message, crypto::bytes_of(key.identity()));
  append(message, dialler);
  append(message, acceptor);
  return crypto::hmac_sha256(key.secret_for("challenge"), message);
}

bool stands(Bytes shown, const Digest& expected) { return crypto::equal(shown, expected); }

std::string listed(const wire::Hello& greeting) {
  std::string text = "peer '" + greeting.name + "' has ";
  for (std::size_t i = 0; i < greeting.keys.size(); ++i) {
    text += (i == 0 ? "" : " and ") + crypto::describe_identity(greeting.keys[i]);
  }
  return text;
}

constexpr const char* kSameMode =
    ": give both the same token file, or make both insecure (insecure=True, --insecure)";

std::string one_is_insecure(const wire::Hello& insecure, const wire::Hello& secure) {
  return "peer '" + insecure.name + "' is insecure, and peer '" + secure.name +
         "' asks for a proof of its token" + kSameMode;
}

Verdict refused(std::string why) { return {std::move(why), {}}; }

std::string no_common_key(const wire::Hello& ours, const wire::Hello& theirs) {
  return listed(theirs) + ", " + listed(ours) + ": give both the same token file";
}

}  // namespace

Authenticator::Authenticator(crypto::Keyring keyring, std::string origin, const Digest& seed)
    : keyring_(std::move(keyring)), origin_(std::move(origin)), seed_(seed) {}

void Authenticator::introduce(wire::Hello& ours, std::uint64_t number) const {
  ours.keys = keyring_.identities();
  const Bytes message = std::as_bytes(std::span(&number, 1));
  ours.nonce = crypto::hmac_sha256(seed_, message);
}

std::string Authenticator::advice() const {
  if (keyring_.empty()) return "this peer is insecure: it shows no token";
  std::string text = "this peer shows ";
  text += crypto::describe_identity(keyring_.identities().front());
  return text + ", from " + origin_ + "; compare with `moolink-broker token show` at the other";
}

// The verdict if a side is insecure: both must be.
std::optional<Verdict> Authenticator::without_proof(const wire::Hello& ours,
                                                    const wire::Hello& theirs) const {
  if (keyring_.empty()) {
    return theirs.keys.empty() ? Verdict{} : refused(one_is_insecure(ours, theirs));
  }
  if (theirs.keys.empty()) return refused(one_is_insecure(theirs, ours));
  return std::nullopt;
}

Verdict Authenticator::answer(const wire::Channel& channel, const wire::Hello& dialler,
                              wire::Hello& acceptor) const {
  if (auto verdict = without_proof(acceptor, dialler)) return std::move(*verdict);
  std::vector<Key> shown;
  for (const std::string& identity : dialler.keys) {
    if (auto key = keyring_.find(identity); key && shown.empty()) shown.push_back(std::move(*key));
  }
  if (shown.empty()) shown = keyring_.keys();
  acceptor.keys.clear();
  for (const Key& key : shown) acceptor.keys.push_back(key.identity());
  acceptor.proof.clear();
  for (const Key& key : shown) {
    const Digest proof = proof_of(key, Side::acceptor, channel, dialler, acceptor);
    acceptor.proof.insert(acceptor.proof.end(), proof.begin(), proof.end());
  }
  return {{}, shown.front().scope};
}

Verdict Authenticator::check_acceptor(const wire::Channel& channel, const wire::Hello& dialler,
                                      const wire::Hello& acceptor, wire::Hello& welcome) const {
  if (auto verdict = without_proof(dialler, acceptor)) return std::move(*verdict);
  for (std::size_t i = 0; i < acceptor.keys.size(); ++i) {
    const auto key = keyring_.find(acceptor.keys[i]);
    if (!key) continue;
    const Bytes proofs(acceptor.proof);
    const std::size_t at = i * sizeof(Digest);
    if (at + sizeof(Digest) > proofs.size() ||
        !stands(proofs.subspan(at, sizeof(Digest)),
                proof_of(*key, Side::acceptor, channel, dialler, acceptor))) {
      return refused("peer '" + acceptor.name + "' names " +
                     crypto::describe_identity(acceptor.keys[i]) + " and cannot prove it");
    }
    const Digest ours = proof_of(*key, Side::dialler, channel, dialler, acceptor);
    welcome.keys = {key->identity()};
    welcome.proof.assign(ours.begin(), ours.end());
    return {{}, key->scope};
  }
  return refused(no_common_key(dialler, acceptor));
}

Verdict Authenticator::check_dialler(const wire::Channel& channel, const wire::Hello& dialler,
                                     const wire::Hello& acceptor,
                                     const wire::Hello& welcome) const {
  if (auto verdict = without_proof(acceptor, dialler)) return std::move(*verdict);
  // Only a key that this side has proven.
  const std::string named = welcome.keys.empty() ? std::string() : welcome.keys.front();
  for (const std::string& identity : acceptor.keys) {
    if (identity != named) continue;
    const auto key = keyring_.find(identity);
    if (key && stands(welcome.proof, proof_of(*key, Side::dialler, channel, dialler, acceptor))) {
      return {{}, key->scope};
    }
  }
  return refused("peer '" + dialler.name + "' names " + crypto::describe_identity(named) +
                 " and cannot prove it");
}

}  // namespace moolink::rpc
