#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>

#include "session/actions.h"
#include "session/outbox.h"
#include "wire/frame.h"

namespace moolink::session {

// Writes the large parts of messages to one connection: in chunks, or by rendezvous: a request for
// memory, the peer's answer that it is ready, and word that the bytes are there. Messages take
// turns, one chunk or request each, and what is in transit is bounded, so that a small message
// waits for a few chunks at most.
//
// One per attached connection, owned by the Sender: it begins and ends with the connection. Finds
// the messages in the Outbox; one that was acknowledged or has moved to another connection drops
// out by itself.
class PartWriter {
 public:
  PartWriter(ConnectionId connection, std::size_t chunk_bytes, Outbox& outbox, ActionSink& sink)
      : connection_(connection), chunk_bytes_(chunk_bytes), outbox_(outbox), sink_(sink) {}

  // The head of a message was written; its unsent parts follow.
  void add(std::uint64_t seq, Outgoing& outgoing);
  // The answer to a request. Throws Exception{wire} if there was none.
  void ready(const wire::Grant& grant);
  void filled(std::uint64_t grant);
  // More chunks may come.
  void writable();

 private:
  void take_turn(std::uint64_t seq, Outgoing& outgoing);
  void write();
  bool write_one(std::uint64_t seq, Outgoing& outgoing);
  void request(std::uint64_t seq, Outgoing& outgoing);
  void write_chunk(std::uint64_t seq, Outgoing& outgoing);

  const ConnectionId connection_;
  const std::size_t chunk_bytes_;  // the size that both sides accept
  Outbox& outbox_;
  ActionSink& sink_;
  std::deque<std::uint64_t> turns_;
  std::uint32_t chunks_queued_ = 0;  // since the transport last reported writable
  std::uint32_t requests_ = 0;       // whose rendezvous is not complete
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint32_t>> filling_;  // grant -> seq, part
};

}  // namespace moolink::session
