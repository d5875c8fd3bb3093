#include "transport/tcp/read_ahead.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace moolink::transport::tcp {
namespace {

constexpr std::size_t kLargeRead = std::size_t{32} << 10;
constexpr std::size_t kLeastCharge = std::size_t{4} << 10;       // the cost of a system call
constexpr std::size_t kLargestReceive = std::size_t{256} << 10;  // of one system call
// Read beyond a large frame: the head of the next one, which then goes straight to its target.
constexpr std::size_t kAheadOfBulk = std::size_t{4} << 10;

}  // namespace

void ReadAhead::begin(ByteStream& stream, std::size_t budget) {
  stream_ = &stream;
  budget_ = budget;
  drained_ = false;
}

std::optional<std::byte> ReadAhead::peek() {
  if (begin_ == end_) receive({});
  return begin_ == end_ ? std::nullopt : std::optional(bytes_[begin_]);
}

std::size_t ReadAhead::read(std::span<std::byte> into) {
  if (into.empty()) return 0;
  bulk_ = bulk_ || into.size() >= kLargeRead;
  std::size_t count = begin_ == end_ ? receive(bulk_ ? into : std::span<std::byte>()) : 0;
  if (count == 0) {
    count = std::min(into.size(), end_ - begin_);
    if (count > 0) std::memcpy(into.data(), bytes_.get() + begin_, count);
    begin_ += count;
  }
  bulk_ = bulk_ && count < into.size();
  return count;
}

std::size_t ReadAhead::skip(std::size_t most) {
  if (begin_ == end_) receive({});
  const std::size_t count = std::min(most, end_ - begin_);
  begin_ += count;
  return count;
}

// Into `direct` first, then into the buffer, which is empty; returns how many came to `direct`.
std::size_t ReadAhead::receive(std::span<std::byte> direct) {
  if (drained_ || ended_ || (budget_ == 0 && !stream_->holds_bytes())) return 0;
  if (size_ < wanted_) {
    bytes_ = std::make_unique_for_overwrite<std::byte[]>(wanted_);
    size_ = wanted_;
  }
  std::array<iovec, 2> pieces;
  std::size_t used = 0;
  const std::size_t most = std::min(direct.size(), kLargestReceive);
  if (most > 0) pieces[used++] = {direct.data(), most};
  if (most == direct.size()) {
    pieces[used++] = {bytes_.get(), most > 0 ? std::min(size_, kAheadOfBulk) : size_};
  }
  const ByteStream::Received taken = stream_->receive(std::span(pieces).first(used), budget_);
  drained_ = taken.drained;
  ended_ = taken.ended;
  budget_ -= std::min(budget_, std::max(taken.bytes, kLeastCharge));
  const std::size_t placed = std::min(taken.bytes, most);
  begin_ = 0;
  end_ = taken.bytes - placed;
  return placed;
}

}  // namespace moolink::transport::tcp
