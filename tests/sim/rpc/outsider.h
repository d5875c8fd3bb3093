#pragma once

// Somebody without a key, who overhears every greeting and may use what it has heard: it replays
// greetings, sends proofs back to who made them, turns the directions round and takes a dial that
// was meant for another. It does not pass greetings on while both sides wait for them: over tcp TLS
// keeps it from that, and shared memory is for processes of one user.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/network.h"
#include "wire/frame.h"

namespace moolink::sim {

class Process;
class World;

// The greeting of one connection.
struct Overheard {
  int dialler = 0;
  int acceptor = 0;
  std::optional<wire::Hello> hello;
  std::optional<wire::Hello> answer;   // of the acceptor
  std::optional<wire::Hello> welcome;  // of the dialler
};

class Outsider final : public Endpoint {
 public:
  explicit Outsider(World& world) : world_(&world) {}

  // Dials a process and greets it in one of its ways.
  void attack(Process& target);
  // A process has dialled what it took for another one's address.
  void dialled_by(ConnectionId connection) { attacks_[connection] = {}; }

  void received(ConnectionId connection, const wire::ReceivedFrame& frame) override;
  std::span<std::byte> chunk_target(ConnectionId, const wire::ChunkHead&) override { return {}; }
  void chunk_received(ConnectionId, const wire::ChunkHead&) override {}
  void closed(ConnectionId connection, const Error&) override { attacks_.erase(connection); }
  void writable(ConnectionId) override {}
  void grant_filled(ConnectionId, std::uint64_t) override {}

 private:
  struct Attack {
    bool dialled = false;
    bool reflects = false;               // sends the proof that it gets back
    std::optional<wire::Hello> welcome;  // what it says when it is answered
  };

  const Overheard* some(int acceptor) const;
  wire::Hello forged() const;
  void write(ConnectionId connection, wire::FrameType type, const wire::Hello& greeting);

  World* world_;
  std::map<ConnectionId, Attack> attacks_;
};

}  // namespace moolink::sim
