#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "wire/frame.h"

namespace moolink::transport {

// Outgoing frames for a stream of bytes (a socket, a ring, slots), held by reference until all
// their bytes are there. It is full from the high-water mark on.
class SendQueue {
 public:
  SendQueue(std::size_t low_water, std::size_t high_water)
      : low_water_(low_water), high_water_(high_water) {}

  void push(wire::Frame frame);
  // Queues bytes without a frame's header.
  void push(std::vector<Buffer> bytes);
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
  // The first bytes, for a stream that takes many pieces at once: fills `pieces` and returns their
  // number; sent() tells how many bytes the stream has taken.
  std::size_t gather(std::span<iovec> pieces) const;
  void sent(std::size_t bytes);
  void clear();

  bool full() const { return bytes_ >= high_water_; }
  // True once after it was full, when it has run down to the low-water mark.
  bool ran_low() { return bytes_ <= low_water_ && std::exchange(was_full_, false); }
  bool empty() const { return queue_.empty(); }
  std::size_t bytes() const { return bytes_; }

 private:
  struct OutgoingFrame {
    std::array<std::byte, wire::kHeaderBytes> header;
    wire::Frame frame;
    bool bare = false;  // only its payload is sent

    std::span<const std::byte> piece(std::size_t index) const;
    std::size_t pieces() const { return 2 + frame.payload.size(); }
  };

  // Of `size` bytes left of the first piece; false: not all of them.
  bool took(std::size_t written, std::size_t size);

  const std::size_t low_water_;
  const std::size_t high_water_;
  std::deque<OutgoingFrame> queue_;
  std::size_t piece_ = 0;       // of the first frame: header, control, payload...
  std::size_t piece_done_ = 0;  // bytes of that piece that have left
  std::size_t bytes_ = 0;
  bool was_full_ = false;
};

}  // namespace moolink::transport
