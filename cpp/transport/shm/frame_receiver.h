#pragma once

#include <array>
#include <cstddef>

#include "base/buffer.h"
#include "base/limits.h"
#include "transport/shm/ring.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace moolink::transport::shm {

// Turns the bytes of a ring into frames for the handler. Everything is copied out of the ring
// before it is looked at; the bytes of a chunk are copied straight into the handler's target.
class FrameReceiver {
 public:
  FrameReceiver(RingReader ring, Environment& environment, Connection& connection);

  // Takes at most `budget` bytes; true if it took any. Stops when stop() is called, also from
  // inside the handler. Throws Exception{wire} for anything a peer must not send.
  bool receive(std::size_t budget);
  void stop();
  void set_max_frame(std::size_t bytes) { limits_.max_frame = bytes; }
  RingReader& ring() { return ring_; }

 private:
  enum class Stage { header, frame, chunk_head, chunk };

  void expect(Stage stage, std::byte* target, std::size_t size);
  void finish_stage();
  void finish_header();
  void finish_chunk_head();

  RingReader ring_;
  Environment& environment_;
  Connection& connection_;
  Limits limits_;
  bool stopped_ = false;

  Stage stage_ = Stage::header;
  std::byte* target_ = nullptr;  // where the next bytes go; nullptr: they are dropped
  std::size_t left_ = 0;         // bytes of the stage that are still to come

  static constexpr std::size_t kLongestChunkHead = 256;
  std::array<std::byte, kLongestChunkHead> scratch_;  // header or chunk head
  wire::FrameHeader header_;
  MutableBuffer frame_;
  wire::ChunkHead chunk_;
};

}  // namespace moolink::transport::shm
