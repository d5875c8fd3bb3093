#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "transport/tcp/byte_stream.h"

namespace moolink::transport::tcp {

// What arrives at a connection, for its FrameReceiver. Small frames come through a buffer; the
// bytes of large ones and of chunks go straight to their memory.
class ReadAhead {
 public:
  // Reads so many bytes ahead.
  explicit ReadAhead(std::size_t bytes) : wanted_(bytes) {}
  void grow(std::size_t bytes) { wanted_ = bytes; }

  // What the next calls read: about `budget` bytes of the stream, and all that it holds already, of
  // which no event tells again.
  void begin(ByteStream& stream, std::size_t budget);
  // The next byte, not taken yet; none: nothing is there now.
  std::optional<std::byte> peek();
  // Returns the number of bytes; 0: there are no more now.
  std::size_t read(std::span<std::byte> into);
  std::size_t skip(std::size_t most);
  void release() {}

  // The peer has closed, and all that it sent was read.
  bool ended() const { return ended_; }

 private:
  std::size_t receive(std::span<std::byte> direct);

  std::size_t wanted_;
  std::unique_ptr<std::byte[]> bytes_;  // made when there is something to receive
  std::size_t size_ = 0;                // of its memory
  std::size_t begin_ = 0;               // of the bytes not taken
  std::size_t end_ = 0;
  bool bulk_ = false;  // a large read has not got all its bytes

  ByteStream* stream_ = nullptr;
  std::size_t budget_ = 0;
  bool drained_ = false;  // the last receive left nothing in the socket
  bool ended_ = false;
};

}  // namespace moolink::transport::tcp
