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

constexpr std::size_t kMostPieces = 64;   // of one record
constexpr std::size_t kMostRecords = 64;  // opened in one receive()
// Up to this size a record may be other than data: its type is checked before any byte is
// delivered.
constexpr std::size_t kPerhapsControl = 64;
constexpr Duration kPause = microseconds(50);  // a later send begins a new burst
constexpr std::size_t kPortions = 16;          // of a burst, each of this many segments:
constexpr std::size_t kLeast = 1;
constexpr std::size_t kMost = 8;
constexpr std::size_t kLeastRead = std::size_t{4} << 10;
constexpr std::size_t kUpdateBytes = 5;  // KeyUpdate: type 24, length 1, whether it asks for one
constexpr std::byte kUpdate{24};
constexpr std::byte kWarning{1};
constexpr std::byte kFatal{2};
constexpr std::byte kCloseNotify{0};
constexpr std::byte kBadRecord{20};

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

// The bytes to send, one record's worth at a time, in place.
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

// --- sending

void TlsStream::push() {
  while (unsent()) {
    const iovec piece{out_.data() + out_begin_, out_end_ - out_begin_};
    const ssize_t count = send_pieces(socket_, std::span(&piece, 1));
    if (count < 0) {
      if (would_block(errno)) return;
      socket_failed(errno);
    }
    out_begin_ += static_cast<std::size_t>(count);
    if (static_cast<std::size_t>(count) < piece.iov_len) return;
  }
  out_begin_ = out_end_ = 0;
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
  if (pause_begins_ < io::now() - kPause) burst_ = 0;
  Pieces plain(pieces, kSentBytes);
  const std::size_t all = plain.left();
  push();
  while (!unsent()) {
    const std::size_t together = sealed_together(plain.left());
    out_.grow(together + kRoomToSend, 0);
    std::span<const iovec> record;
    while (out_end_ < together && !(record = plain.next()).empty()) {
      if (update_owed_ || sealer_->records() >= context_->records_per_key_) update_own_key();
      seal(RecordType::data, record);
    }
    burst_ += out_end_;
    push();
    if (record.empty()) break;
  }
  pause_begins_ = unsent() ? kNever : io::now();
  return {all - plain.left(), unsent()};
}

void TlsStream::seal(RecordType type, std::span<const iovec> pieces) {
  const std::byte* end = sealer_->seal(type, pieces, out_.data() + out_end_);
  out_end_ = static_cast<std::size_t>(end - out_.data());
}

void TlsStream::update_own_key() {
  std::array<std::byte, kUpdateBytes> update{kUpdate, {}, {}, std::byte{1}, {}};
  const iovec piece{update.data(), update.size()};
  seal(RecordType::handshake, std::span(&piece, 1));
  sealer_->next_key();
  update_owed_ = false;
}

void TlsStream::alert(std::byte level, std::byte what) {
  std::array<std::byte, 2> content{level, what};
  const iovec piece{content.data(), content.size()};
  // There is room for a record after the waiting ones, unless this is not the first alert.
  if (out_end_ + kMostSealed <= out_.bytes) seal(RecordType::alert, std::span(&piece, 1));
}

bool TlsStream::shut_down() {
  if (sealer_ && !std::exchange(said_goodbye_, true)) alert(kWarning, kCloseNotify);
  push();
  if (unsent()) return false;
  ::shutdown(socket_, SHUT_WR);
  return true;
}

// --- receiving

bool TlsStream::has_record() const {
  const std::size_t here = in_end_ - in_begin_;
  return here >= kRecordHead && here >= kRecordHead + sealed_bytes(in_.data() + in_begin_);
}

bool TlsStream::holds_bytes() const {
  return opener_ && (opened_begin_ < opened_end_ || has_record());
}

ByteStream::Received TlsStream::receive(std::span<const iovec> pieces, std::size_t allowance) {
  may_read_ = allowance;
  socket_empty_ = false;
  Received received;
  Places room(pieces);
  for (std::size_t records = 0; records < kMostRecords;) {
    const std::span<std::byte> into = room.next();
    if (into.empty()) {
      received.drained = socket_empty_ && !holds_bytes() && !closed_;
      return received;
    }
    std::size_t count = give_opened(into);
    if (count == 0 && has_record()) {
      ++records;
      if (closed_) throw Exception(ErrorCode::wire, "TLS: a record after the last one");
      count = open_record(into);
    } else if (count == 0 && (closed_ || !read_more())) {
      received.ended = closed_ && received.bytes == 0;  // reported once all before it is taken
      received.drained = !closed_;
      return received;
    }
    room.take(count);
    received.bytes += count;
  }
  return received;
}

// Opened bytes that did not fit into their target.
std::size_t TlsStream::give_opened(std::span<std::byte> into) {
  const std::size_t count = std::min(into.size(), opened_end_ - opened_begin_);
  if (count == 0) return 0;
  std::memcpy(into.data(), opened_.data() + opened_begin_, count);
  opened_begin_ += count;
  if (opened_begin_ == opened_end_) opened_begin_ = opened_end_ = 0;
  return count;
}

// Returns how many of its bytes are in `into`; the rest is kept.
std::size_t TlsStream::open_record(std::span<std::byte> into) {
  const std::byte* head = in_.data() + in_begin_;
  const std::size_t sealed = sealed_bytes(head);
  if (head[0] != static_cast<std::byte>(RecordType::data) || sealed < kRecordTail ||
      sealed > kRecordBytes + kRecordTail) {
    throw Exception(ErrorCode::wire, "TLS: no record of encrypted data, or one that is too long");
  }
  const std::span<const std::byte> record(head, kRecordHead + sealed);
  in_begin_ += record.size();
  const std::size_t content = sealed - kRecordTail;
  const bool in_place = content > kPerhapsControl;
  const std::size_t placed = in_place ? std::min(content, into.size()) : 0;
  RecordType type = RecordType::data;
  const std::span<std::byte> rest(opened_.data(), kMostSealed);
  if (!opener_->open(record, into.first(placed), rest, type)) {
    alert(kFatal, kBadRecord);
    push();
    throw Exception(ErrorCode::wire, "TLS: a record was changed on its way");
  }
  if (type != RecordType::data) {
    take_control(type, rest.first(in_place ? 0 : content));
    return 0;
  }
  opened_end_ = content - placed;
  return in_place ? placed : give_opened(into);
}

void TlsStream::take_control(RecordType type, std::span<const std::byte> content) {
  if (type == RecordType::alert && content.size() == 2) {
    if (content[1] != kCloseNotify) {
      throw Exception(ErrorCode::wire,
                      "TLS: the peer's alert " + std::to_string(std::to_integer<int>(content[1])));
    }
    closed_ = true;
  } else if (type == RecordType::handshake && content.size() == kUpdateBytes &&
             content[0] == kUpdate) {
    opener_->next_key();
    update_owed_ = update_owed_ || content[4] != std::byte{0};
  } else {
    throw Exception(ErrorCode::wire, "TLS: a record that no peer sends");
  }
}

// Reads the socket until a whole record is here; false: nothing more now.
bool TlsStream::read_more() {
  while (!has_record()) {
    if (may_read_ == 0 || socket_empty_) return false;
    read_socket();
    if (socket_error_ != 0) socket_failed(socket_error_);
    if (socket_ended_) {
      throw Exception(ErrorCode::peer_lost, "cut off: it has not said that it ends");
    }
  }
  return true;
}

// The buffer holds at most the beginning of a record.
void TlsStream::read_socket() {
  if (in_begin_ > 0) {
    std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
    in_end_ -= std::exchange(in_begin_, 0);
  }
  in_.grow(kMostSealed, 0);
  const std::size_t most = std::min(in_.bytes - in_end_, std::max(may_read_, kLeastRead));
  const iovec piece{in_.data() + in_end_, most};
  const ssize_t count = receive_pieces(socket_, std::span(&piece, 1));
  if (count < 0) {
    would_block(errno) ? void(socket_empty_ = true) : void(socket_error_ = errno);
    return;
  }
  const auto received = static_cast<std::size_t>(count);
  may_read_ -= std::min(may_read_, received);
  socket_ended_ = received == 0;
  socket_empty_ = received < most;
  if (received > 0 && !std::exchange(begun_, true)) not_tls_ = !begins_tls(*in_.data());
  in_end_ += received;
}

}  // namespace moolink::transport::tcp
