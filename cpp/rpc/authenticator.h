#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "crypto/keyring.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::rpc {

// One side's verdict on the other's greeting.
struct Verdict {
  std::string refusal;  // why it may not connect, for both sides; empty: it may
  std::string scope;    // the group that the connection is confined to; empty: none
};

// Decides which peers may connect. Both sides prove a key, the acceptor first: by an HMAC over both
// greetings, the side that makes it, the path and the key's name. Nonces make each greeting new, so
// that no proof can be replayed. A peer without keys is insecure: it sends no proof, requires none,
// and says so to a peer that sends one. See docs/design/security.md.
class Authenticator {
 public:
  // `origin`: the source of the keys ("the token file /home/…"), for this peer's user. `seed`:
  // random and secret; the nonces derive from it.
  explicit Authenticator(crypto::Keyring keyring = {}, std::string origin = {},
                         const crypto::Digest& seed = {});

  // Before this side's greeting is sent: adds the keys that it can prove, and a nonce; `number`
  // differs each time.
  void introduce(wire::Hello& ours, std::uint64_t number) const;
  // The acceptor, before its greeting is sent: adds its proof to it, of the first of the dialler's
  // keys that this side has; with none, of each of its own, for a dialler that can derive it.
  Verdict answer(const wire::Channel& channel, const wire::Hello& dialler,
                 wire::Hello& acceptor) const;
  // The dialler: whether the acceptor's proof is valid. Adds its own to `welcome`.
  Verdict check_acceptor(const wire::Channel& channel, const wire::Hello& dialler,
                         const wire::Hello& acceptor, wire::Hello& welcome) const;
  // The acceptor: whether the proof in the dialler's welcome is valid.
  Verdict check_dialler(const wire::Channel& channel, const wire::Hello& dialler,
                        const wire::Hello& acceptor, const wire::Hello& welcome) const;
  // Whether this side has no keys.
  bool is_insecure() const { return keyring_.empty(); }
  // The scope of this side's own keys.
  std::string scope() const { return keyring_.scope(); }
  // Advice to this side's user after a refusal. May name files: not for the other side.
  std::string advice() const;

 private:
  std::optional<Verdict> without_proof(const wire::Hello& ours, const wire::Hello& theirs) const;

  crypto::Keyring keyring_;
  std::string origin_;
  crypto::Digest seed_;
};

}  // namespace moolink::rpc
