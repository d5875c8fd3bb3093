#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/limits.h"
#include "base/time.h"
#include "wire/frame.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::session {

// A body or part up to this size travels in the message's frame, together up to the second size;
// larger ones follow as chunks or go into grants, so that they delay no other message.
inline constexpr std::size_t kInlineBytes = std::size_t{16} << 10;
inline constexpr std::size_t kInlineTotal = std::size_t{64} << 10;

// How far a message may be ahead of the first unacknowledged one. Much more than the window, which
// counts the unacknowledged ones: small messages pass a large one in transfer.
inline constexpr std::uint64_t kMaxSpan = 32768;

// A message of the session itself: the loans that its sender returns. Users' kinds are above it.
inline constexpr std::uint8_t kReturnKind = 0;

struct OutgoingMessage {
  std::uint16_t lane = 0;  // 0: unordered
  std::uint8_t kind = 0;   // the rpc layer's
  bool held = false;       // the peer may hold it back with WINDOW
  Time deadline = kNever;
  wire::Payload payload;
  std::uint64_t cookie = 0;  // passed back in Acked or Lost
};

// Throws Exception{invalid_argument} if the message is over the limits.
void check(const OutgoingMessage& message, const Limits& limits);

// A body or part outside the message's frame.
struct LargePart {
  enum class State : std::uint8_t { waiting, requested, filling, streaming, sent };
  std::uint32_t part = 0;  // index, or wire::kBodyPart
  State state = State::waiting;
  std::uint64_t offset = 0;
};

// The large parts that an attempt to send a message has not written yet, by their indices, so that
// none is searched for: a message may have 65,536.
struct Unsent {
  std::vector<std::size_t> to_request;  // its memory
  std::size_t next_to_request = 0;      // the first of them that is left
  // Lowest index first.
  std::priority_queue<std::size_t, std::vector<std::size_t>, std::greater<>> to_stream;

  bool has_to_request() const { return next_to_request < to_request.size(); }
  bool empty() const { return !has_to_request() && to_stream.empty(); }
};

struct Outgoing {
  OutgoingMessage message;
  std::uint64_t lane_prev = 0;
  std::uint64_t inline_bytes = 0;
  std::uint64_t large_bytes = 0;
  std::uint64_t parts_cost = 0;  // wire::kPartCost of each
  std::vector<LargePart> large;
  // Null until the attempt writes the message's head, and if no part is large.
  std::unique_ptr<Unsent> unsent;
  bool has_turn = false;  // the message's number is among the turns of its connection
  // Whether the connection can lend its parts: asked once per attempt.
  enum class Lending : std::uint8_t { unasked, asked, possible, impossible };
  Lending lending = Lending::unasked;
  std::vector<std::uint64_t> loans;   // of payload.lent, one each; 0: not given in any attempt yet
  wire::ConnectionId connection = 0;  // it was written to; 0: to be written
  std::uint32_t attempt = 0;
  bool written = false;  // at least once, to any connection
  bool acked = false;

  const Buffer& bytes_of(std::uint32_t part) const {
    return part == wire::kBodyPart ? message.payload.body : message.payload.parts[part];
  }
  LargePart* find_large(std::uint32_t part);
  void stream(LargePart& part) {
    part.state = LargePart::State::streaming;
    unsent->to_stream.push(static_cast<std::size_t>(&part - large.data()));
  }
  // Resets the message: nothing of it has been written to the next connection.
  void begin_attempt();
};

// Messages sent and not yet acknowledged, numbered from 1, with the windows that bound them.
class Outbox {
 public:
  explicit Outbox(const Limits& limits) : limits_(limits) {}

  bool empty() const { return unacked_ == 0; }
  std::uint64_t bytes() const { return inline_bytes_ + large_bytes_; }
  std::uint64_t first() const { return first_; }
  std::uint64_t last() const { return first_ + messages_.size() - 1; }
  // Null if there is no such message or it is acknowledged.
  Outgoing* find(std::uint64_t seq);

  // Whether a message of `bytes` in all, of `parts` parts, fits the windows.
  bool has_room(std::uint64_t bytes, std::size_t parts, bool held) const;
  // Numbers the message; the caller has checked has_room and check.
  std::uint64_t push(OutgoingMessage message);

  // Calls done(cookie) for each newly acknowledged message, in order. False: the peer acknowledges
  // a message that was never sent.
  template <class Callback>
  bool acknowledge(std::uint64_t cum, std::span<const std::uint64_t> bitmap, Callback done) {
    if (cum > last()) return false;
    for (std::uint64_t seq = first_; seq <= cum; ++seq) take(seq, done);
    for (std::size_t word = 0; word < bitmap.size(); ++word) {
      for (std::uint64_t bits = bitmap[word]; bits != 0; bits &= bits - 1) {
        const std::uint64_t seq =
            cum + 1 + 64 * word + static_cast<std::uint64_t>(std::countr_zero(bits));
        if (seq > last()) return false;
        take(seq, done);
      }
    }
    trim();
    return true;
  }

  // Returns everything unacknowledged, in order, and resets the outbox.
  std::vector<Outgoing> clear();
  // Messages to write (again): those of a lost connection.
  void unassign(wire::ConnectionId connection);

  // The peer's WINDOW: it takes so many bytes, and calls only if `messages` is not zero. Ignores a
  // WINDOW with an older number, which arrived late over a slow path.
  void set_peer_window(const wire::Window& window, std::uint64_t number) {
    if (number < peer_window_number_) return;
    peer_window_number_ = number;
    peer_window_ = window;
  }

 private:
  template <class Callback>
  void take(std::uint64_t seq, Callback& done) {
    Outgoing* outgoing = find(seq);
    if (outgoing == nullptr) return;
    outgoing->acked = true;
    --unacked_;
    outgoing->message.payload = {};  // the user's bytes are free
    done(outgoing->message.cookie);
  }
  void trim();

  Limits limits_;
  wire::Window peer_window_{~std::uint64_t{0}, ~std::uint64_t{0}};
  std::uint64_t peer_window_number_ = 0;
  std::deque<Outgoing> messages_;  // [first_, last()]; acknowledged ones among them are empty
  std::uint64_t first_ = 1;
  std::uint64_t unacked_ = 0;
  // Of all messages in the deque, acknowledged or not: the receiver may hold these back for the
  // order of a lane, and the window protects its memory.
  std::uint64_t inline_bytes_ = 0;
  std::uint64_t large_bytes_ = 0;
  std::uint64_t parts_cost_ = 0;                      // counts with the bytes in frames
  std::map<std::uint16_t, std::uint64_t> lane_last_;  // lane -> seq of its last message
};

}  // namespace moolink::session
