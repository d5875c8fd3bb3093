#include "crypto/keyring.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/names.h"

namespace moolink::crypto {

namespace {

constexpr std::string_view kPrefix = "moolink1:";  // of identities: prefix, id, ':', scope
constexpr std::size_t kIdDigits = 16;

std::string hex(Bytes bytes) {
  static constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += kDigits[std::to_integer<std::size_t>(byte >> 4)];
    text += kDigits[std::to_integer<std::size_t>(byte & std::byte{15})];
  }
  return text;
}

std::vector<std::byte> derive(const Digest& secret, const std::string& info, std::size_t length) {
  return hkdf_sha256(secret, {}, bytes_of(info), length);
}

Digest derive_secret(const Digest& secret, const std::string& info) {
  const std::vector<std::byte> derived = derive(secret, info, sizeof(Digest));
  Digest result;
  std::copy(derived.begin(), derived.end(), result.begin());
  return result;
}

// The id that an identity names, and its scope.
std::optional<std::pair<std::string_view, std::string_view>> parse(std::string_view identity) {
  const std::size_t scope = kPrefix.size() + kIdDigits + 1;
  if (!identity.starts_with(kPrefix) || identity.size() < scope || identity[scope - 1] != ':' ||
      !(identity.size() == scope || is_name(identity.substr(scope)))) {
    return std::nullopt;
  }
  const std::string_view id = identity.substr(kPrefix.size(), kIdDigits);
  if (id.find_first_not_of("0123456789abcdef") != std::string_view::npos) return std::nullopt;
  return std::pair{id, identity.substr(scope)};
}

}  // namespace

std::string Key::id() const { return hex(derive(secret, "moolink key id", kIdDigits / 2)); }

std::string Key::identity() const { return std::string(kPrefix) + id() + ":" + scope; }

Digest Key::secret_for(std::string_view use) const {
  return derive_secret(secret, "moolink use " + std::string(use));
}

Key Key::of_group(std::string_view group) const {
  return {derive_secret(secret, "moolink group " + std::string(group)), std::string(group)};
}

std::string describe_identity(std::string_view identity) {
  const auto parsed = parse(identity);
  if (!parsed) return "a key that is none of moolink's";
  const std::string id = "key " + std::string(parsed->first);
  return parsed->second.empty() ? id + " of the whole job"
                                : id + " of group '" + std::string(parsed->second) + "'";
}

std::optional<std::string> scope_of(std::string_view identity) {
  const auto parsed = parse(identity);
  return parsed ? std::optional(std::string(parsed->second)) : std::nullopt;
}

Keyring::Keyring(std::vector<Key> keys) : keys_(std::move(keys)) {
  if (keys_.size() > kMaxKeys) {
    throw Exception(ErrorCode::invalid_argument,
                    "a peer holds at most " + std::to_string(kMaxKeys) + " keys, not " +
                        std::to_string(keys_.size()) + ": drop those that no peer shows any more");
  }
  for (const Key& key : keys_) {
    if (!key.scope.empty()) check_name("a group's name", key.scope);
    if (key.scope != keys_.front().scope) {
      throw Exception(
          ErrorCode::invalid_argument,
          "the keys of one peer are all of the whole job, or all of one group: a process "
          "in several groups holds the job's token, or makes a peer for each");
    }
    identities_.push_back(key.identity());
  }
}

std::optional<Key> Keyring::find(std::string_view identity) const {
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    if (identities_[i] == identity) return keys_[i];
  }
  const auto parsed = parse(identity);
  if (!parsed || parsed->second.empty()) return std::nullopt;
  for (const Key& key : keys_) {
    if (!key.scope.empty()) continue;
    Key derived = key.of_group(parsed->second);
    if (derived.identity() == identity) return derived;
  }
  return std::nullopt;
}

}  // namespace moolink::crypto
