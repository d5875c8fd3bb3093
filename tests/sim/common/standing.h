#pragma once

// Standing grants as a runtime uses them: a part is captured into the peer's memory before it is
// sent, and a grant that no message has named in the end goes back.

#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "base/buffer.h"
#include "wire/payload.h"

namespace moolink::sim {

class HeldGrant : public wire::StandingGrant {
 public:
  HeldGrant(wire::ConnectionId in, std::uint64_t number, std::function<void()> release)
      : release_(std::move(release)) {
    connection = in;
    grant = number;
  }
  HeldGrant(const HeldGrant&) = delete;
  HeldGrant& operator=(const HeldGrant&) = delete;
  ~HeldGrant() {
    if (!named) release_();
  }

 private:
  std::function<void()> release_;
};

// `part` of the payload moves into `memory`.
inline void place(wire::Payload& payload, std::uint32_t part, const MutableBuffer& memory,
                  std::shared_ptr<HeldGrant> held) {
  Buffer& bytes = payload.parts[part];
  std::memcpy(memory.data(), bytes.data(), bytes.size());
  // The memory itself is the network's until the end of the simulation.
  bytes = Buffer(held, memory.data(), bytes.size());
  payload.placed.push_back({part, std::move(held)});
}

}  // namespace moolink::sim
