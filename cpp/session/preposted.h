#pragma once

// Pre-posted buffers: memory that the receiver grants in advance, so that a large part is captured
// straight into it, and its message needs no answer. docs/design/protocol/session.md, "Pre-posted
// buffers".

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/time.h"
#include "session/actions.h"
#include "session/config.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::session {

// A part may be placed in a buffer of at most this many times its size.
inline constexpr std::uint64_t kMaxSlack = 4;

// This side's buffers that the peer may fill, one for each part that it names in a message. Owned
// by the Session, which offers more of the kind that were used; the Inbox takes the buffers that a
// message names. A buffer ends when it is taken or released, or with its connection.
class PrepostedBuffers {
 public:
  explicit PrepostedBuffers(ActionSink& sink) : sink_(sink) {}

  // A part of `bytes` has arrived in a grant: more of its kind are likely. Asks the transport for
  // memory, and post() passes it to the peer.
  void offer(ConnectionId connection, const wire::PathTraits& traits, std::uint64_t bytes);
  // As many as the last message has used.
  void offer_again(ConnectionId connection, const wire::PathTraits& traits);
  void post(ConnectionId connection, const wire::GrantPlace& place, MutableBuffer memory);

  // The part of `bytes` that a message says to be there. Throws Exception{wire} if it cannot be.
  MutableBuffer take(ConnectionId connection, std::uint64_t grant, std::uint64_t bytes);
  // The peer does not need it. False: there is no such buffer.
  bool release(ConnectionId connection, std::uint64_t grant) {
    return buffers_.erase({connection, grant}) == 1;
  }
  std::size_t size() const { return buffers_.size(); }

  void disconnected(ConnectionId connection);
  void clear();

 private:
  ActionSink& sink_;
  std::map<std::pair<ConnectionId, std::uint64_t>, MutableBuffer> buffers_;
  std::vector<std::uint64_t> used_;  // sizes of the parts that the last message has placed
};

// A buffer of the peer that this side may fill.
struct PeerBuffer {
  ConnectionId connection = 0;
  wire::GrantPlace place;
};

// The peer's buffers for parts of this side. Owned by the Session: take() gives one to the code
// that captures a part, and those that are idle for too long are returned to the peer.
class PeerBuffers {
 public:
  explicit PeerBuffers(const Timing& timing) : timing_(timing) {}

  // Throws Exception{wire} for more than an honest peer gives.
  void add(Time now, ConnectionId connection, const wire::Grant& grant);
  // The smallest that is large enough; of equal ones the latest, whose memory is warm.
  std::optional<PeerBuffer> take(ConnectionId connection, std::uint64_t bytes);
  std::vector<PeerBuffer> take_idle(Time now);
  Time next_deadline() const;

  void disconnected(ConnectionId connection) { buffers_.erase(connection); }
  void clear() { buffers_.clear(); }

 private:
  struct Entry {
    wire::GrantPlace place;
    Time since{};
  };

  const Timing& timing_;
  std::map<ConnectionId, std::vector<Entry>> buffers_;  // in the order of their arrival
};

}  // namespace moolink::session
