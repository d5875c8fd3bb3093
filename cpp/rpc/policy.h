#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "wire/frame.h"

namespace moolink::rpc {

// Who may connect. Both greetings of a connection, in the order dialler, acceptor, are what a proof
// is made over (their nonces differ for each connection, so a proof cannot be replayed).
class Policy {
 public:
  virtual ~Policy() = default;

  // What this side shows the other: it is the dialler, or not.
  virtual std::vector<std::byte> proof(const wire::Hello& dialler, const wire::Hello& acceptor,
                                       bool by_dialler) const = 0;
  // Whether the other side's proof stands; `reason` is told to it and to the log if not.
  virtual bool accepts(const wire::Hello& dialler, const wire::Hello& acceptor, bool by_dialler,
                       const std::vector<std::byte>& proof, std::string& reason) const = 0;
};

// No token: shows an empty proof and asks for none. For loopback and for tests.
class OpenPolicy final : public Policy {
 public:
  std::vector<std::byte> proof(const wire::Hello&, const wire::Hello&, bool) const override {
    return {};
  }
  bool accepts(const wire::Hello&, const wire::Hello&, bool, const std::vector<std::byte>&,
               std::string&) const override {
    return true;
  }
};

}  // namespace moolink::rpc
