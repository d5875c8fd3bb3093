#pragma once

#include <cstddef>
#include <deque>
#include <utility>

#include "target.h"

namespace moolink::fuzz {

// What machines have sent to each other, kept to be delivered to anybody, bent and again.
template <class Message>
class Mail {
 public:
  void post(Message message) {
    kept_.push_back(std::move(message));
    if (kept_.size() > kMost) kept_.pop_front();
  }
  bool empty() const { return kept_.empty(); }
  // One of the last, counted from the newest.
  Message pick(Input& input) const { return kept_[kept_.size() - 1 - input.byte() % kept_.size()]; }

 private:
  static constexpr std::size_t kMost = 128;

  std::deque<Message> kept_;
};

inline Bytes copy_of(const Buffer& buffer) { return {buffer.span().begin(), buffer.span().end()}; }

}  // namespace moolink::fuzz
