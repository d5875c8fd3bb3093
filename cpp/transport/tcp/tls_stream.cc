// The records of a connection once its handshake is done.

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/loop.h"
#include "transport/tcp/tls.h"

namespace moolink::transport::tcp {
namespace {

constexpr std::size_t kMostPieces = 64;        // of one record
constexpr std::size_t kMostReads = 64;         // of OpenSSL in one receive()
constexpr int kMostWithoutData = 100;          // consecutive reads
constexpr Duration kPause = microseconds(50);  // a later send begins a new burst
constexpr std::size_t kPortions = 16;          // of a burst, each of this many segments:
constexpr std::size_t kLeast = 1;
constexpr std::size_t kMost = 8;
constexpr std::size_t kLeastRead = std::size_t{4} << 10;

// From OpenSSL's headers.
constexpr int kClosed = 6;     // SSL_ERROR_ZERO_RETURN
constexpr int kUpdateOwn = 0;  // SSL_KEY_UPDATE_NOT_REQUESTED: does not ask for the peer's

// Targets to receive into, one after the other.
class Places {
 public:
  explicit Places(std::span<const iovec> pieces) : pieces_(pieces) {}

  std::span<std::byte> next() {
    while (at_ < pieces_.size() && offset_ == pieces_[at_].iov_len) ++at_, offset_ = 0;
    if (at_ == pieces_.size()) return {};
    const iovec& piece = pieces_[at_];
    return {static_cast<std::byte*>(piece.iov_base) + offset_, piece.iov_len - offset_};
  }
  void take(std::size_t bytes) { offset_ += bytes; }

 private:
  std::span<const iovec> pieces_;
  std::size_t at_ = 0;
  std::size_t offset_ = 0;
};

// The bytes to send, one record's worth at a time.
class Pieces {
 public:
  Pieces(std::span<const iovec> pieces, std::size_t record_bytes)
      : pieces_(pieces), record_bytes_(record_bytes) {
    for (const iovec& piece : pieces) left_ += piece.iov_len;
  }

  // Empty: nothing is left.
  std::span<const iovec> next() {
    std::size_t used = 0;
    for (std::size_t room = record_bytes_; room > 0 && used < record_.size();) {
      while (at_ < pieces_.size() && offset_ == pieces_[at_].iov_len) ++at_, offset_ = 0;
      if (at_ == pieces_.size()) break;
      const iovec& piece = pieces_[at_];
      const std::size_t size = std::min(room, piece.iov_len - offset_);
      record_[used++] = {static_cast<std::byte*>(piece.iov_base) + offset_, size};
      offset_ += size;
      room -= size;
      left_ -= size;
    }
    return std::span(record_).first(used);
  }
  std::size_t left() const { return left_; }  // bytes

 private:
  std::span<const iovec> pieces_;
  std::size_t record_bytes_;
  std::array<iovec, kMostPieces> record_;
  std::size_t at_ = 0;
  std::size_t offset_ = 0;
  std::size_t left_ = 0;
};

}  // namespace

// --- memory

void TlsRoom::grow(std::size_t wanted) {
  if (bytes >= wanted) return;
  auto larger = std::make_unique_for_overwrite<std::byte[]>(wanted);
  if (end > 0) std::memcpy(larger.get(), memory.get(), end);
  memory = std::move(larger);
  bytes = wanted;
}

void TlsRoom::add(const void* data, std::size_t size) {
  if (size > 0) std::memcpy(memory.get() + end, data, size);
  end += size;
}

void TlsRoom::pack() {
  if (begin == 0) return;
  if (!empty()) std::memmove(memory.get(), data(), size());
  end -= std::exchange(begin, 0);
}

// --- sending

void TlsStream::push() {
  while (unsent()) {
    TlsRoom& room = sending_.empty() ? out_ : sending_;
    const iovec piece{room.data(), room.size()};
    const ssize_t count = send_pieces(socket_, std::span(&piece, 1));
    if (count < 0) {
      if (would_block(errno)) return;
      socket_failed(errno);
    }
    room.begin += static_cast<std::size_t>(count);
    if (!room.empty()) return;
    room.clear();
  }
}

// Bytes of records for one system call: whole segments, or the whole rest if it is hardly more.
// Many at once cost less, but the peer opens the last ones while no bytes are sent: a short burst
// leaves in small portions.
std::size_t TlsStream::sealed_together(std::size_t left) const {
  const std::size_t segments = std::clamp(burst_ / kPortions / kSegment, kLeast, kMost);
  const std::size_t together = segments * kSegment;
  const std::size_t all = left + left / 256 + 64;  // with heads and tails
  return all < together + kSegment / 2 ? all : together;
}

ByteStream::Sent TlsStream::send(std::span<const iovec> pieces) {
  if (busy_ || failure_) {  // receive() reports the failure
    push();
    return {0, true};
  }
  if (const std::size_t taken = fill_turn(pieces); taken > 0) {
    begin_turn();
    push();
    return {taken, busy_ || unsent()};
  }
  if (pause_begins_ < io::now() - kPause) burst_ = 0;
  Pieces plain(pieces, kSentBytes);
  const std::size_t all = plain.left();
  push();
  while (!unsent()) {
    const std::size_t together = sealed_together(plain.left());
    out_.grow(together + kRoomToSend);
    std::span<const iovec> record;
    while (out_.size() < together && !(record = plain.next()).empty()) seal(record);
    burst_ += out_.size();
    push();
    if (record.empty()) break;
  }
  pause_begins_ = unsent() ? kNever : io::now();
  return {all - plain.left(), unsent()};
}

void TlsStream::seal(std::span<const iovec> pieces) {
  const void* data = pieces.front().iov_base;
  std::size_t size = pieces.front().iov_len;
  if (pieces.size() > 1) {
    record_.clear();
    for (const iovec& piece : pieces) record_.add(piece.iov_base, piece.iov_len);
    data = record_.data();
    size = record_.size();
  }
  openssl_.clear_errors();
  if (records_ >= context_->records_per_key_ && openssl_.ssl_update_key(ssl_, kUpdateOwn) == 1) {
    records_ = 0;
  }
  ++records_;
  std::size_t written = 0;
  // OpenSSL cannot write while it has only a part of a handshake message of the peer's.
  if (openssl_.ssl_write(ssl_, data, size, &written) != 1) {
    throw Exception(ErrorCode::wire, "TLS: OpenSSL cannot write a record: " + first_reason());
  }
}

bool TlsStream::shut_down() {
  if (busy_) return false;
  if (open_ && !std::exchange(close_notify_sent_, true)) {
    openssl_.clear_errors();
    openssl_.ssl_shut_down(ssl_);  // writes the alert
  }
  push();
  if (unsent()) return false;
  ::shutdown(socket_, SHUT_WR);
  return true;
}

// --- receiving

std::size_t sealed_bytes(const std::byte* head) {
  return std::to_integer<std::size_t>(head[3]) << 8 | std::to_integer<std::size_t>(head[4]);
}

bool TlsStream::has_record() const {
  return in_.size() >= kRecordHead && in_.size() >= kRecordHead + sealed_bytes(in_.data());
}

// Whether OpenSSL has more bytes.
bool TlsStream::has_more() const { return openssl_.ssl_pending(ssl_) > 0 || has_record(); }

bool TlsStream::holds_bytes() const {
  if (!opened_.empty()) return true;
  if (!open_ || busy_) return false;
  if (!opening_.empty() || failure_) return true;
  return !closed_ && (has_more() || !arriving_.empty());
}

ByteStream::Received TlsStream::receive(std::span<const iovec> pieces, std::size_t allowance) {
  may_read_ = allowance;
  socket_empty_ = false;
  begin_turn();
  Received received;
  Places room(pieces);
  for (std::size_t reads = 0; reads < kMostReads; ++reads) {
    const std::span<std::byte> into = room.next();
    if (into.empty()) {
      received.drained = socket_empty_ && !busy_ && !holds_bytes() && !closed_;
      return received;
    }
    std::size_t count = take_opened(into);
    if (count == 0 && busy_) {
      if (may_read_ > 0) read_socket(arriving_);
      received.drained = true;
      return received;
    }
    if (count == 0) {
      if (failure_ && received.bytes > 0) return received;
      if (failure_) throw Exception(*failure_);
      if (closed_ || (!has_more() && !read_more())) {
        // An end is reported after all bytes before it.
        if (!closed_ && received.bytes == 0) check_socket();
        received.ended = closed_ && received.bytes == 0;
        received.drained = !closed_ && !socket_is_over();
        return received;
      }
      count = read_at_once(into);
    }
    room.take(count);
    received.bytes += count;
  }
  return received;
}

std::size_t TlsStream::read_at_once(std::span<std::byte> into) {
  const std::size_t sealed = out_.end;
  const std::size_t count = read_record(into);
  if (out_.end != sealed) push();  // an alert, or the answer to a KeyUpdate
  return count;
}

// Reads from the record that was decrypted last, or from the next one. 0: the record has no data,
// or reading failed (failure_).
std::size_t TlsStream::read_record(std::span<std::byte> into) {
  openssl_.clear_errors();
  std::size_t count = 0;
  const bool read = openssl_.ssl_read(ssl_, into.data(), into.size(), &count) == 1;
  const int error = read ? 0 : openssl_.ssl_error(ssl_, 0);
  closed_ = error == kClosed;
  without_data_ = read ? 0 : without_data_ + 1;
  std::string failure;
  if (!read && !closed_ && error != kWantsRead) failure = first_reason();
  if (without_data_ > kMostWithoutData) failure = "too many records without data";
  if (!failure.empty()) failure_ = make_error(ErrorCode::wire, "TLS: " + failure);
  return count;
}

// Reads the socket until a whole record is here; false: nothing more now.
bool TlsStream::read_more() {
  while (!has_record()) {
    if (!arriving_.empty()) {
      join_arrived();
      continue;
    }
    if (socket_is_over() || may_read_ == 0 || socket_empty_) return false;
    read_ahead();
  }
  return true;
}

void TlsStream::check_socket() const {
  if (socket_error_ != 0) socket_failed(socket_error_);
  if (socket_ended_) {
    throw Exception(ErrorCode::peer_lost, "cut off without close_notify");
  }
}

// Called while in_ holds at most the beginning of a record.
void TlsStream::read_ahead() {
  in_.pack();
  in_.grow(kMostSealed);
  read_socket(in_);
  if (!in_.empty() && !std::exchange(begun_, true)) not_tls_ = !begins_tls(*in_.data());
}

void TlsStream::read_socket(TlsRoom& room) {
  const std::size_t most = std::min(room.left(), std::max(may_read_, kLeastRead));
  if (most == 0) return;
  const iovec piece{room.rest().data(), most};
  const ssize_t count = receive_pieces(socket_, std::span(&piece, 1));
  if (count < 0) {
    would_block(errno) ? void(socket_empty_ = true) : void(socket_error_ = errno);
    return;
  }
  const auto received = static_cast<std::size_t>(count);
  may_read_ -= std::min(may_read_, received);
  socket_ended_ = received == 0;
  socket_empty_ = received < most;
  room.end += received;
}

}  // namespace moolink::transport::tcp
