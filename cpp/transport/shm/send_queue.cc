#include "transport/shm/send_queue.h"

#include <utility>

namespace moolink::transport::shm {

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

bool SendQueue::write_to(RingWriter& ring) {
  bool moved = false;
  while (!queue_.empty()) {
    const auto piece = queue_.front().piece(piece_).subspan(piece_done_);
    const std::size_t written = ring.write(piece);
    bytes_ -= written;
    piece_done_ += written;
    moved |= written > 0;
    if (written < piece.size()) break;
    piece_done_ = 0;
    if (++piece_ < queue_.front().pieces()) continue;
    piece_ = 0;
    queue_.pop_front();
  }
  ring.publish();
  return moved;
}

void SendQueue::clear() {
  queue_.clear();
  piece_ = piece_done_ = bytes_ = 0;
}

}  // namespace moolink::transport::shm
