#pragma once

#include <array>
#include <cstddef>
#include <deque>

#include "transport/shm/ring.h"
#include "wire/frame.h"

namespace moolink::transport::shm {

// Frames on their way into a ring, held by reference until all their bytes are there.
class SendQueue {
 public:
  void push(wire::Frame frame);
  // Moves what the ring has room for; true if anything was moved.
  bool write_to(RingWriter& ring);
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

  std::deque<OutgoingFrame> queue_;
  std::size_t piece_ = 0;       // of the first frame: header, control, payload...
  std::size_t piece_done_ = 0;  // bytes of that piece that are in the ring
  std::size_t bytes_ = 0;
};

}  // namespace moolink::transport::shm
