#pragma once

#include <cstdint>

#include "base/limits.h"
#include "base/time.h"
#include "session/config.h"
#include "session/sequence_set.h"
#include "wire/frame.h"

namespace moolink::session {

// Which messages are complete here, and when the peer is told. Every frame of an attached
// connection carries the acknowledgement (stamp); a frame of its own (ack) is needed only without
// traffic, or for numbers above a gap. The Inbox adds messages, the ActionSink stamps frames, and
// the Session writes the ACK when due() or the deadline says so. clear() begins another session.
class Acknowledgements {
 public:
  explicit Acknowledgements(const Timing& timing) : timing_(timing) {}

  const SequenceSet& complete() const { return complete_; }
  void add(std::uint64_t seq) { complete_.insert(seq); }

  // The peer must hear of `messages` more. True: at once.
  bool due(Time now, std::uint32_t messages) {
    if (messages == 0) return false;
    if (due_ == 0) deadline_ = now + timing_.ack_after;
    due_ += messages;
    return due_ >= timing_.ack_every;
  }
  bool is_due() const { return due_ > 0; }
  Time deadline() const { return deadline_; }
  // The ACK is written now, or the next greeting carries it.
  void settle() {
    due_ = 0;
    deadline_ = kNever;
  }
  void stamp(wire::FrameHeader& header) {
    header.ack = complete_.cum();
    if (!complete_.has_gaps()) settle();
  }
  wire::Ack ack() const { return {complete_.cum(), complete_.bitmap()}; }
  void clear() {
    complete_ = {};
    settle();
  }

 private:
  const Timing& timing_;
  SequenceSet complete_;
  std::uint32_t due_ = 0;
  Time deadline_ = kNever;
};

// How much this side takes, as the peer was told by WINDOW or will be. The Session writes it when
// it changes, and again when connections change: the last one may be lost with its connection. A
// new session begins with the limits.
class ReceiveWindow {
 public:
  explicit ReceiveWindow(const Limits& limits) : limits_(limits) { clear(); }

  void set(std::uint64_t bytes, std::uint64_t messages) {
    window_ = {bytes, messages};
    ++number_;
  }
  bool has_changed() const { return number_ > 0; }
  // Whether a new connection's peer would take it for another one than it is.
  bool must_be_told() const {
    return has_changed() || window_.bytes != Limits{}.send_window_bytes ||
           window_.messages != Limits{}.send_window_messages;
  }
  wire::Frame frame() const {
    wire::Frame frame = wire::make_frame(wire::FrameType::window, window_);
    frame.header.seq = number_;
    return frame;
  }
  void clear() {
    window_ = {limits_.send_window_bytes, limits_.send_window_messages};
    number_ = 0;
  }

 private:
  const Limits& limits_;
  wire::Window window_;
  std::uint64_t number_ = 0;  // in the order of sending: the frames may overtake each other
};

}  // namespace moolink::session
