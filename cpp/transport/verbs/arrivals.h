#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

namespace moolink::transport::verbs {

// The order of reading across queue pairs: a SEND of the stream carries the number of marks sent
// before it, and is read after that many have arrived. An early one is copied out of its slot,
// which others need: marks use slots too.
class Arrivals {
 public:
  // A mark has arrived.
  void marked() { ++marks_; }
  // Whether a SEND with this number of marks can be read now.
  bool may_read(std::uint16_t marks) const {
    return held_.empty() && static_cast<std::int16_t>(marks - marks_) <= 0;
  }
  void hold(std::uint16_t marks, std::span<const std::byte> bytes) {
    held_.push_back({marks, {bytes.begin(), bytes.end()}});
  }
  std::size_t held() const { return held_.size(); }
  // The next held SEND, if it can be read now.
  std::optional<std::vector<std::byte>> next() {
    if (held_.empty() || static_cast<std::int16_t>(held_.front().marks - marks_) > 0) {
      return std::nullopt;
    }
    std::optional<std::vector<std::byte>> bytes(std::move(held_.front().bytes));
    held_.pop_front();
    return bytes;
  }

 private:
  struct Held {
    std::uint16_t marks;
    std::vector<std::byte> bytes;
  };

  std::uint16_t marks_ = 0;  // arrived marks; wraps around
  std::deque<Held> held_;
};

}  // namespace moolink::transport::verbs
