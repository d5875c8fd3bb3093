#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/limits.h"
#include "base/thread_safety.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace moolink::transport {

// Frames that a path handles itself. Both functions throw Exception{wire}.
class OwnFrames {
 public:
  virtual ~OwnFrames() = default;
  // Handles a frame; false: the frame is for the handler.
  virtual bool takes(const wire::ReceivedFrame& frame) MOOLINK_LOCKED = 0;
  // The bytes of a chunk come on the stream numbered `way`; an empty target discards them.
  virtual void chunk_apart(std::uint8_t way, const wire::ChunkHead& head,
                           std::span<std::byte> target) MOOLINK_LOCKED = 0;
};

// Turns a stream of bytes (a socket, a ring, slots) into frames for the handler. Everything is
// copied out of the stream before it is parsed; the bytes of a chunk are copied straight into the
// handler's target.
class FrameReceiver {
 public:
  FrameReceiver(Environment& environment, Connection& connection, OwnFrames* own = nullptr);

  // Takes at most `budget` bytes; true if it took any. Stops when stop() is called, also from
  // inside the handler. Throws Exception{wire} for anything a peer must not send.
  template <class Stream>
  bool receive(Stream& stream, std::size_t budget) MOOLINK_LOCKED {
    std::size_t taken = 0;
    while (!stopped_ && (taken < budget || left_ == 0)) {
      const std::size_t want = std::min(left_, budget - taken);
      std::size_t got = 0;
      if (target_ == nullptr) {
        got = stream.skip(want);
      } else {
        got = stream.read({target_, want});
        target_ += got;
      }
      left_ -= got;
      taken += got;
      if (left_ == 0) {
        finish_stage();
      } else if (got < want) {
        break;
      }
    }
    stream.release();
    return taken > 0;
  }
  void stop() MOOLINK_LOCKED;
  void set_max_frame(std::size_t bytes) MOOLINK_LOCKED { limits_.max_frame = bytes; }

 private:
  enum class Stage { header, frame, chunk_head, chunk };

  void expect(Stage stage, std::byte* target, std::size_t size) MOOLINK_LOCKED;
  void finish_stage() MOOLINK_LOCKED;
  void finish_header() MOOLINK_LOCKED;
  void finish_chunk_head() MOOLINK_LOCKED;

  Environment& environment_;
  Connection& connection_;
  OwnFrames* const own_;
  Limits limits_;
  bool stopped_ = false;

  Stage stage_ = Stage::header;
  std::byte* target_ = nullptr;  // where the next bytes go; nullptr: they are dropped
  std::size_t left_ = 0;         // bytes of the stage still to come

  static constexpr std::size_t kLongestChunkHead = 256;
  std::array<std::byte, kLongestChunkHead> scratch_;  // header or chunk head
  wire::FrameHeader header_;
  MutableBuffer frame_;
  wire::ChunkHead chunk_;
};

}  // namespace moolink::transport
