#include "transport/send_queue.h"

#include <algorithm>

namespace moolink::transport {

std::span<const std::byte> SendQueue::OutgoingFrame::piece(std::size_t index) const {
  if (index == 0) return bare ? std::span<const std::byte>() : header;
  if (index == 1) return frame.control.span();
  return frame.payload[index - 2].span();
}

void SendQueue::push(wire::Frame frame) {
  bytes_ += frame.bytes();
  const auto header = wire::encode_header(frame.header);
  queue_.push_back({header, std::move(frame)});
  was_full_ = was_full_ || full();
}

void SendQueue::push(std::vector<Buffer> bytes) {
  for (const Buffer& piece : bytes) bytes_ += piece.size();
  queue_.push_back({{}, {{}, {}, std::move(bytes)}, true});
  was_full_ = was_full_ || full();
}

std::size_t SendQueue::gather(std::span<iovec> pieces) const {
  std::size_t used = 0;
  std::size_t index = piece_;
  std::size_t done = piece_done_;
  for (const OutgoingFrame& out : queue_) {
    for (; index < out.pieces(); ++index) {
      if (used == pieces.size()) return used;
      const auto bytes = out.piece(index).subspan(std::exchange(done, 0));
      if (!bytes.empty()) pieces[used++] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
    }
    index = 0;
  }
  return used;
}

void SendQueue::sent(std::size_t bytes) {
  while (!queue_.empty()) {
    const std::size_t left = queue_.front().piece(piece_).size() - piece_done_;
    const std::size_t taken = std::min(bytes, left);
    bytes -= taken;
    if (!took(taken, left)) return;
  }
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
