#pragma once

#include <cstdint>
#include <string>

#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::rpc {

// One side's verdict on the other's greeting.
struct Verdict {
  std::string refusal;  // why it may not connect, for both sides; empty: it may
  std::string scope;    // the group that the connection is confined to; empty: none
};

// Decides which peers may connect. Both sides prove themselves over both greetings, the acceptor
// first; nonces make each greeting new, so that no proof can be replayed.
class Policy {
 public:
  virtual ~Policy() = default;

  // Before this side's greeting is sent: adds the keys that it can prove, and a nonce; `number`
  // differs each time.
  virtual void introduce(wire::Hello& ours, std::uint64_t number) const = 0;
  // The acceptor, before its greeting is sent: adds its proof to it.
  virtual Verdict answer(const wire::Channel& channel, const wire::Hello& dialler,
                         wire::Hello& acceptor) const = 0;
  // The dialler: whether the acceptor's proof is valid. Adds its own to `welcome`.
  virtual Verdict check_acceptor(const wire::Channel& channel, const wire::Hello& dialler,
                                 const wire::Hello& acceptor, wire::Hello& welcome) const = 0;
  // The acceptor: whether the proof in the dialler's welcome is valid.
  virtual Verdict check_dialler(const wire::Channel& channel, const wire::Hello& dialler,
                                const wire::Hello& acceptor, const wire::Hello& welcome) const = 0;
  // The scope of this side's own keys.
  virtual std::string scope() const = 0;
  // What this side's user should check after a refusal. May name files: not for the other side.
  virtual std::string advice() const = 0;
};

// Insecure: sends no proof, requires none, and tells so a peer that sends one.
class OpenPolicy final : public Policy {
 public:
  void introduce(wire::Hello&, std::uint64_t) const override {}
  Verdict answer(const wire::Channel&, const wire::Hello& dialler,
                 wire::Hello& acceptor) const override;
  Verdict check_acceptor(const wire::Channel&, const wire::Hello& dialler,
                         const wire::Hello& acceptor, wire::Hello& welcome) const override;
  Verdict check_dialler(const wire::Channel&, const wire::Hello& dialler,
                        const wire::Hello& acceptor, const wire::Hello& welcome) const override;
  std::string scope() const override { return {}; }
  std::string advice() const override;
};

}  // namespace moolink::rpc
