#pragma once

#include <optional>
#include <string>
#include <vector>

#include "crypto/keyring.h"
#include "rpc/policy.h"

namespace moolink::rpc {

// Mutual proof of a key: an HMAC over both greetings, the side that makes it, the path and the
// key's name. See docs/design/security.md.
class TokenPolicy final : public Policy {
 public:
  // `origin`: the source of the keys ("the token file /home/…"), for this peer's user. `seed`:
  // random and secret; the nonces derive from it.
  TokenPolicy(crypto::Keyring keyring, std::string origin, const crypto::Digest& seed);

  void introduce(wire::Hello& ours, std::uint64_t number) const override;
  // Proves the first of the dialler's keys that this side has; with none, each of its own, for a
  // dialler that can derive it.
  Verdict answer(const wire::Channel& channel, const wire::Hello& dialler,
                 wire::Hello& acceptor) const override;
  Verdict check_acceptor(const wire::Channel& channel, const wire::Hello& dialler,
                         const wire::Hello& acceptor, wire::Hello& welcome) const override;
  Verdict check_dialler(const wire::Channel& channel, const wire::Hello& dialler,
                        const wire::Hello& acceptor, const wire::Hello& welcome) const override;
  std::string scope() const override { return keyring_.scope(); }
  std::string advice() const override;

 private:
  std::string no_common_key(const wire::Hello& ours, const wire::Hello& theirs) const;

  crypto::Keyring keyring_;
  std::string origin_;
  crypto::Digest seed_;
};

}  // namespace moolink::rpc
