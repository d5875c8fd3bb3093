#pragma once

// A peer's own keys, which it also requires of others. A token is a key of the whole job; the key
// of a group is derived from it, and opens that group only.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "crypto/sha256.h"

namespace moolink::crypto {

struct Key {
  Digest secret{};
  std::string scope;  // the group whose key it is; empty: the whole job

  // Short and public: two peers that name the same id hold the same key.
  std::string id() const;  // 16 hexadecimal digits
  // Peers exchange it, also as a PSK identity of TLS: id and scope, as text.
  std::string identity() const;
  // A secret for one use only ("tls", "challenge"), so that no two protocols share a key.
  Digest secret_for(std::string_view use) const;
  // The key of a group, derived from a key of the whole job.
  Key of_group(std::string_view group) const;

  bool operator==(const Key& other) const {
    return equal(secret, other.secret) && scope == other.scope;
  }
};

// "key 0123456789abcdef of the whole job", "... of group 'x'"; other text is described as no
// moolink key. For messages: contains no secret.
std::string describe_identity(std::string_view identity);
// The scope that it names; nothing if it is no identity.
std::optional<std::string> scope_of(std::string_view identity);

// The keys that a peer holds, in order: it offers the first, and accepts each (rotation: two are
// valid while a new one is distributed). All have one scope. Empty: the peer is insecure.
class Keyring {
 public:
  static constexpr std::size_t kMaxKeys = 8;

  Keyring() = default;
  // Throws Exception{invalid_argument}: too many, of several scopes, or a scope that is no name.
  explicit Keyring(std::vector<Key> keys);

  bool empty() const { return keys_.empty(); }
  // The group that its holder is confined to; empty: none.
  std::string scope() const { return keys_.empty() ? std::string() : keys_.front().scope; }
  const std::vector<Key>& keys() const { return keys_; }
  // Of each key, in order; the first is offered where only one can be.
  const std::vector<std::string>& identities() const { return identities_; }
  // The key that another peer names: one of these, or a group's key derived from one of the whole
  // job. So a holder of the token reaches the members of all groups, and a holder of a group's key
  // only its members and holders of the token.
  std::optional<Key> find(std::string_view identity) const;

 private:
  std::vector<Key> keys_;
  std::vector<std::string> identities_;
};

}  // namespace moolink::crypto
