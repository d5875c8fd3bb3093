#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/descriptor.h"
#include "memory/segment.h"

namespace moolink::transport::shm {

// A byte stream from one process to another in a sealed segment that the reader made: one page of
// words, then 2^k bytes of data. Positions count bytes since the beginning and never wrap.
//
// Both ends keep their own position privately and publish it; values of the other end are hostile
// until checked: a position outside the ring throws Exception{wire}, and no byte outside the ring
// is ever touched. Data is copied out before it is parsed, so that the peer cannot change it after
// the check.
//
// Sleeping. Each end publishes its position, then checks whether the other one sleeps; the other
// one announces its sleep, then checks the position again. All four are seq_cst, so one of the two
// sees the other's store and no wake-up is lost. While both are awake no system call is made.
struct RingWords {
  alignas(64) std::atomic<std::uint64_t> tail;     // bytes written; the writer's
  std::atomic<std::uint64_t> base;                 // position at the first byte; the writer's
  alignas(64) std::atomic<std::uint64_t> head;     // bytes read; the reader's
  alignas(64) std::atomic<std::uint64_t> asleep;   // 1: the reader wants a ring when tail moves
  alignas(64) std::atomic<std::uint64_t> wake_at;  // not 0: the writer wants one at this head
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

inline constexpr std::size_t kDefaultRingBytes = std::size_t{1} << 20;
inline constexpr std::size_t kSmallestRingBytes = std::size_t{4} << 10;
inline constexpr std::size_t kLargestRingBytes = std::size_t{64} << 20;
// After this many bytes a writer returns to the ring's first byte when the ring is empty: the pages
// of a quiet connection are few, and stay in the cache.
inline constexpr std::size_t kRingRewindBytes = std::size_t{16} << 10;
// Copies are published in pieces, so that the other end copies at the same time.
inline constexpr std::size_t kRingPieceBytes = std::size_t{64} << 10;

// The segment of a ring of `capacity` bytes, which is rounded up to a power of two.
std::shared_ptr<memory::Segment> make_ring(std::size_t capacity);
// A ring's segment that a peer made. Throws Exception{wire} if it cannot be one.
std::shared_ptr<memory::Segment> map_ring(const Descriptor& descriptor);

class RingWriter {
 public:
  // `reader` is rung (io/doorbell.h) when the reader sleeps; it outlives the writer.
  RingWriter(std::shared_ptr<memory::Segment> segment, const Descriptor& reader);

  // Copies as much as there is room for and returns that number.
  std::size_t write(std::span<const std::byte> bytes);
  // Makes everything written visible to the reader and wakes it if it sleeps.
  void publish();
  // Publishes, and requests a ring when half of the ring is free; false if it is already.
  bool await_room();

 private:
  std::size_t room();
  void rewind();

  std::shared_ptr<memory::Segment> segment_;
  RingWords* words_;
  std::byte* data_;
  std::uint64_t capacity_;
  std::uint64_t tail_ = 0;       // written
  std::uint64_t published_ = 0;  // written and visible to the reader
  std::uint64_t head_ = 0;       // the reader's position when last looked at
  std::uint64_t base_ = 0;       // position at the first byte
  const Descriptor& reader_;
};

class RingReader {
 public:
  // `writer` is rung when the writer waits for room; it outlives the reader.
  RingReader(std::shared_ptr<memory::Segment> segment, const Descriptor& writer);

  // Copies out at most into.size() bytes and returns their number.
  std::size_t read(std::span<std::byte> into);
  // Drops at most `size` bytes and returns their number.
  std::size_t skip(std::size_t size);
  // Returns the room of everything read to the writer and wakes it if it waits.
  void release();
  // Whether bytes wait to be read.
  bool readable();
  // Announces that this end sleeps and wants to be rung; false if bytes have arrived meanwhile.
  bool prepare_sleep();
  // This end polls again: no more rings.
  void wake();

 private:
  std::size_t available();
  void advance(std::size_t size);

  std::shared_ptr<memory::Segment> segment_;
  RingWords* words_;
  const std::byte* data_;
  std::uint64_t capacity_;
  std::uint64_t head_ = 0;      // read
  std::uint64_t released_ = 0;  // read, and the room returned
  std::uint64_t tail_ = 0;      // the writer's position when last looked at
  std::uint64_t base_ = 0;      // of the bytes up to tail_
  const Descriptor& writer_;
};

}  // namespace moolink::transport::shm
