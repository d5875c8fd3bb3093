// Encrypts and decrypts the records of large transfers on another thread.

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/barrier.h"
#include "transport/tcp/tls.h"

namespace moolink::transport::tcp {

// Copies the bytes that a turn will encrypt; returns their number. 0: no turn is possible, or there
// are too few bytes.
std::size_t TlsStream::fill_turn(std::span<const iovec> pieces) {
  std::size_t all = 0;
  for (const iovec& piece : pieces) all += piece.iov_len;
  if (!turns_.run || failure_ || all < turns_.least || !out_.empty()) return 0;
  to_seal_.grow(kSealedInTurn);
  for (const iovec& piece : pieces) {
    to_seal_.add(piece.iov_base, std::min(piece.iov_len, to_seal_.left()));
  }
  return to_seal_.size();
}

// Begins a turn unless there are too few bytes for one.
void TlsStream::begin_turn() {
  if (!turns_.run || busy_ || failure_ || !out_.empty()) return;
  show_opened();
  const bool opens = !closed_ && opening_.empty() && in_.size() >= turns_.least && has_record();
  if (to_seal_.empty() && !opens) return;
  if (opens) {
    opening_.grow(in_.size());
    if (arriving_.bytes == 0) {
      arriving_.grow(kMostSealed + kIncoming);
      arriving_.begin = arriving_.end = kMostSealed;
    }
  }
  out_.grow(kSealedInTurn + kRoomToSend);
  sending_.grow(out_.bytes);
  busy_ = true;
  try {
    turns_.run([this] { turn(); });
  } catch (const std::exception&) {
    turn();  // on this thread
    turned();
  }
}

// Runs on the other thread. It decrypts as much as opening_ has room for.
void TlsStream::turn() noexcept {
  const auto work = [this] {
    while (!to_seal_.empty()) {
      const iovec record{to_seal_.data(), std::min(to_seal_.size(), kSentBytes)};
      seal(std::span(&record, 1));
      to_seal_.begin += record.iov_len;
    }
    to_seal_.clear();
    while (opening_.left() > 0 && !closed_ && !failure_ && has_more()) {
      opening_.end += read_record(opening_.rest());
    }
  };
  guard(work, [this](Error error) { failure_ = std::move(error); });
}

void TlsStream::turned() {
  busy_ = false;
  if (sending_.empty()) std::swap(out_, sending_);
  join_arrived();
}

void TlsStream::show_opened() {
  if (busy_ || !opened_.empty() || opening_.empty()) return;
  opened_.clear();
  std::swap(opening_, opened_);
}

// Appends the bytes that arrived during the turn to those left in in_: the beginning of a record,
// or more if the turn had no room to decrypt it.
void TlsStream::join_arrived() {
  if (arriving_.empty()) return;
  if (in_.size() <= arriving_.begin) {
    arriving_.begin -= in_.size();
    if (!in_.empty()) std::memcpy(arriving_.data(), in_.data(), in_.size());
    std::swap(in_, arriving_);
    arriving_.clear();
    arriving_.grow(kMostSealed + kIncoming);
  } else {
    in_.pack();
    const std::size_t count = std::min(in_.left(), arriving_.size());
    in_.add(arriving_.data(), count);
    arriving_.begin += count;
  }
  if (arriving_.empty()) arriving_.begin = arriving_.end = kMostSealed;
}

std::size_t TlsStream::take_opened(std::span<std::byte> into) {
  show_opened();
  const std::size_t count = std::min(into.size(), opened_.size());
  if (count > 0) std::memcpy(into.data(), opened_.data(), count);
  opened_.begin += count;
  return count;
}

}  // namespace moolink::transport::tcp
