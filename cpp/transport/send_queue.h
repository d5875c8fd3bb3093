#pragma once

#include <array>
#include <cstddef>
#include <deque>

#include "wire/frame.h"

namespace moolink::transport {

// Outgoing frames for a stream of bytes (a ring, slots), held by reference until all their bytes
// are there.
class SendQueue {
 public:
  void push(wire::Frame frame);
  // Moves as much as the ring has room for; true if anything was moved.
  template <class Stream>
  bool write_to(Stream& stream) {
    bool moved = false;
    while (!queue_.empty()) {
      const auto piece = queue_.front().piece(piece_).subspan(piece_done_);
      const std::size_t written = stream.write(piece);
      moved |= written > 0;
      if (!took(written, piece.size())) break;
    }
    stream.publish();
    return moved;
  }
  void clear();

  bool empty() const { return queue_.empty(); }
  std::size_t bytes() const { return bytes_; }

 private:
  struct OutgoingFrame {
    std::array<std::byte, wire::kHeaderBytes> header;
    wire::Frame frame;

    std::span<const std::byte> piece(std::size_t index) const;
    std::size_t pieces() const { return 2 + frame.payload.size(); }
  };

  // False: the piece has not left completely.
  bool took(std::size_t written, std::size_t size);

  std::deque<OutgoingFrame> queue_;
  std::size_t piece_ = 0;       // of the first frame: header, control, payload...
  std::size_t piece_done_ = 0;  // bytes of that piece that have left
  std::size_t bytes_ = 0;
};

}  // namespace moolink::transport
