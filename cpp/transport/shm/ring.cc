#include "transport/shm/ring.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/error.h"
#include "io/doorbell.h"

namespace moolink::transport::shm {
namespace {

constexpr std::size_t kWordsBytes = 4096;
static_assert(sizeof(RingWords) <= kWordsBytes);

RingWords* words_of(memory::Segment& segment) {
  // A new segment is all zero, which is the value of every word of a new ring.
  return std::launder(reinterpret_cast<RingWords*>(segment.data()));
}

std::uint64_t capacity_of(const memory::Segment& segment) { return segment.size() - kWordsBytes; }

[[noreturn]] void throw_bad_position(const char* whose, std::uint64_t position) {
  throw Exception(ErrorCode::wire, std::string("the peer put the ") + whose +
                                       " of a shared-memory ring at " + std::to_string(position) +
                                       ", which is outside of the ring");
}

}  // namespace

std::shared_ptr<memory::Segment> make_ring(std::size_t capacity) {
  capacity = std::bit_ceil(std::clamp(capacity, kSmallestRingBytes, kLargestRingBytes));
  return memory::Segment::create(kWordsBytes + capacity, "moolink-ring");
}

std::shared_ptr<memory::Segment> map_ring(const Descriptor& descriptor) {
  auto segment = memory::Segment::map(descriptor, kWordsBytes + kLargestRingBytes);
  if (segment->size() < kWordsBytes + kSmallestRingBytes ||
      !std::has_single_bit(capacity_of(*segment))) {
    throw Exception(ErrorCode::wire, "a peer passed a ring of " + std::to_string(segment->size()) +
                                         " bytes, which is no page and a power of two");
  }
  return segment;
}

RingWriter::RingWriter(std::shared_ptr<memory::Segment> segment, const Descriptor& reader)
    : segment_(std::move(segment)),
      words_(words_of(*segment_)),
      data_(segment_->data() + kWordsBytes),
      capacity_(capacity_of(*segment_)),
      reader_(reader) {}

std::size_t RingWriter::room() {
  const std::uint64_t head = words_->head.load(std::memory_order_acquire);
  // Unsigned: a head that went back, or beyond the published position, is a huge number here.
  if (head - head_ > published_ - head_) throw_bad_position("head", head);
  head_ = head;
  return capacity_ - (tail_ - head_);
}

// An empty ring has nothing left at its old place. The reader reads `base` after the tail that was
// published with it.
void RingWriter::rewind() {
  if (tail_ - base_ < kRingRewindBytes || tail_ != published_) return;
  room();
  if (head_ != tail_) return;
  base_ = tail_;
  words_->base.store(base_, std::memory_order_relaxed);
}

std::size_t RingWriter::write(std::span<const std::byte> bytes) {
  rewind();
  std::size_t done = 0;
  while (done < bytes.size()) {
    std::size_t piece = std::min(bytes.size() - done, kRingPieceBytes);
    if (capacity_ - (tail_ - head_) < piece) piece = std::min(piece, room());
    if (piece == 0) break;
    const std::size_t offset = (tail_ - base_) & (capacity_ - 1);
    const std::size_t first = std::min<std::size_t>(piece, capacity_ - offset);
    std::memcpy(data_ + offset, bytes.data() + done, first);
    std::memcpy(data_, bytes.data() + done + first, piece - first);
    tail_ += piece;
    done += piece;
    if (tail_ - published_ >= kRingPieceBytes) publish();
  }
  return done;
}

void RingWriter::publish() {
  if (tail_ == published_) return;
  published_ = tail_;
  words_->tail.store(tail_, std::memory_order_seq_cst);
  if (words_->asleep.load(std::memory_order_seq_cst) != 0 && words_->asleep.exchange(0) != 0) {
    io::ring(reader_);
  }
}

bool RingWriter::await_room() {
  publish();
  if (tail_ <= capacity_ / 2) return false;
  const std::uint64_t half_free = tail_ - capacity_ / 2;
  words_->wake_at.store(half_free, std::memory_order_seq_cst);
  const std::uint64_t head = words_->head.load(std::memory_order_seq_cst);
  if (head < half_free) return true;
  words_->wake_at.store(0, std::memory_order_relaxed);
  return false;
}

RingReader::RingReader(std::shared_ptr<memory::Segment> segment, const Descriptor& writer)
    : segment_(std::move(segment)),
      words_(words_of(*segment_)),
      data_(segment_->data() + kWordsBytes),
      capacity_(capacity_of(*segment_)),
      writer_(writer) {}

std::size_t RingReader::available() {
  const std::uint64_t tail = words_->tail.load(std::memory_order_acquire);
  // Unsigned: a tail that went back, or beyond the room, is a huge number here.
  if (tail - tail_ > released_ + capacity_ - tail_) throw_bad_position("tail", tail);
  if (tail != tail_) base_ = words_->base.load(std::memory_order_relaxed);
  tail_ = tail;
  return tail_ - head_;
}

std::size_t RingReader::read(std::span<std::byte> into) {
  std::size_t done = 0;
  while (done < into.size()) {
    std::size_t piece = std::min(into.size() - done, kRingPieceBytes);
    if (tail_ - head_ < piece) piece = std::min(piece, available());
    if (piece == 0) break;
    const std::size_t offset = (head_ - base_) & (capacity_ - 1);
    const std::size_t first = std::min<std::size_t>(piece, capacity_ - offset);
    std::memcpy(into.data() + done, data_ + offset, first);
    std::memcpy(into.data() + done + first, data_, piece - first);
    done += piece;
    advance(piece);
  }
  return done;
}

std::size_t RingReader::skip(std::size_t size) {
  const std::size_t piece = std::min(size, available());
  advance(piece);
  return piece;
}

void RingReader::advance(std::size_t size) {
  head_ += size;
  if (head_ - released_ >= std::min<std::uint64_t>(kRingPieceBytes, capacity_ / 2)) release();
}

void RingReader::release() {
  if (head_ == released_) return;
  released_ = head_;
  words_->head.store(head_, std::memory_order_seq_cst);
  const std::uint64_t wake_at = words_->wake_at.load(std::memory_order_seq_cst);
  if (wake_at != 0 && head_ >= wake_at && words_->wake_at.exchange(0) != 0) io::ring(writer_);
}

bool RingReader::readable() { return available() > 0; }

bool RingReader::prepare_sleep() {
  words_->asleep.store(1, std::memory_order_seq_cst);
  const std::uint64_t tail = words_->tail.load(std::memory_order_seq_cst);
  if (tail == head_) return true;
  wake();
  return false;
}

void RingReader::wake() {
  if (words_->asleep.load(std::memory_order_relaxed) != 0) {
    words_->asleep.store(0, std::memory_order_relaxed);
  }
}

}  // namespace moolink::transport::shm
