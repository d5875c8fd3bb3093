#include "transport/send_queue.h"

#include <utility>

namespace moolink::transport {

std::span<const std::byte> SendQueue::OutgoingFrame::piece(std::size_t index) const {
  if (index == 0) return header;
  if (index == 1) return frame.control.span();
  return frame.payload[index - 2].span();
}

void SendQueue::push(wire::Frame frame) {
  bytes_ += frame.bytes();
  const auto header = wire::encode_header(frame.header);
  queue_.push_back({header, std::move(frame)});
}

bool SendQueue::took(std::size_t written, std::size_t size) {
  bytes_ -= written;
  piece_done_ += written;
  if (written < size) return false;
  piece_done_ = 0;
  if (++piece_ < queue_.front().pieces()) return true;
  piece_ = 0;
  queue_.pop_front();
  return true;
}

void SendQueue::clear() {
  queue_.clear();
  piece_ = piece_done_ = bytes_ = 0;
}

}  // namespace moolink::transport
