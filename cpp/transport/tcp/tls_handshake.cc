// The handshake of a connection, done by OpenSSL, and the reasons of its failures.

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/names.h"
#include "transport/tcp/tls.h"

namespace moolink::transport::tcp {
namespace {

// From OpenSSL's headers.
constexpr int kAtEnd = 2;   // BIO_CTRL_EOF
constexpr int kFlush = 11;  // BIO_CTRL_FLUSH
constexpr int kRetryRead = 0x08 | 0x01;
constexpr int kRetryFlags = 0x0f;
constexpr unsigned long kReasonMask = 0x7fffff;
constexpr unsigned long kFirstAlert = 1000;  // reasons of alerts from the peer
constexpr unsigned long kLastAlert = 1255;
constexpr unsigned long kWrongBinder = 253;  // SSL_R_BINDER_DOES_NOT_VERIFY

constexpr std::size_t kMostGreeting = std::size_t{16} << 10;  // handshake bytes read at once
constexpr std::size_t kMostRefusal = std::size_t{12} << 10;   // of the most and longest identities

constexpr std::byte kHandshake{22};  // the type of a record

constexpr const char* kSameToken =
    "give both the same token (Rpc(token=...), --token-file, MOOLINK_TOKEN_FILE)";

TlsStream& stream_of(Bio* bio) {
  return *static_cast<TlsStream*>(find_openssl().functions->bio_data(bio));
}

}  // namespace

bool begins_tls(std::byte first) {
  constexpr std::byte kChangeCipher{20};
  constexpr std::byte kApplicationData{23};
  return first >= kChangeCipher && first <= kApplicationData;
}

TlsStream::TlsStream(std::shared_ptr<TlsContext> context, int socket,
                     std::optional<crypto::Key> key, TlsTurns turns)
    : context_(std::move(context)),
      openssl_(context_->openssl_),
      socket_(socket),
      key_(std::move(key)),
      turns_(std::move(turns)) {
  if (key_) identity_ = key_->identity();
}

TlsStream::~TlsStream() { openssl_.ssl_free(ssl_); }

// --- handshake

void TlsStream::begin() {
  out_.grow(kMostSealed);
  ssl_ = openssl_.ssl_new(context_->context_);
  Bio* bio = ssl_ == nullptr ? nullptr : openssl_.bio_new(context_->bio_method_);
  if (bio == nullptr) throw std::bad_alloc();
  openssl_.bio_set_data(bio, this);
  openssl_.bio_set_ready(bio, 1);
  openssl_.ssl_set_bio(ssl_, bio, bio);
  openssl_.ssl_set_data(ssl_, 0, this);
  if (key_) return openssl_.ssl_dial(ssl_);
  openssl_.ssl_accept(ssl_);
  // Without this an acceptor that verifies refuses every session.
  constexpr unsigned char kName[] = {'m', 'o', 'o', 'l', 'i', 'n', 'k'};
  openssl_.ssl_set_name(ssl_, kName, sizeof kName);
}

bool TlsStream::shake_hands() {
  may_read_ = kMostGreeting;
  socket_empty_ = false;
  if (ssl_ == nullptr) {
    if (!may_begin()) return false;
    begin();
  }
  openssl_.clear_errors();
  const int result = openssl_.ssl_handshake(ssl_);
  if (result == 1 && openssl_.ssl_key_used(ssl_) == 1 && export_binding()) {
    open();
    push();
    return true;
  }
  // An acceptor waits only for a dialler with a known key: OpenSSL may have asked for another
  // hello.
  const bool may_wait = key_ || known_;
  if (result != 1 && may_wait && !not_tls_ && openssl_.ssl_error(ssl_, result) == kWantsRead) {
    push();
    return false;
  }
  handshake_failed();
}

// At an acceptor: whether the first record has arrived. OpenSSL takes tens of kilobytes for a
// connection, and as many as a message announces: none are spent before a whole message, and a
// dialler that sends only the beginning of one is refused.
bool TlsStream::may_begin() {
  if (key_) return true;
  read_ahead();
  if (socket_error_ != 0) handshake_failed();
  if (not_tls_) not_tls();
  const bool too_long = in_.size() >= kRecordHead && sealed_bytes(in_.data()) > kRecordBytes;
  if (too_long || (has_record() && !begins_with_whole_message())) {
    throw HandshakeFailure(ErrorCode::auth,
                           "its TLS handshake does not begin with a whole message in one record");
  }
  if (has_record()) return true;
  if (socket_ended_) handshake_failed();
  return false;
}

// Whether the first record contains a whole handshake message (RFC 8446, 4 and 5.1), as a moolink
// peer's does.
bool TlsStream::begins_with_whole_message() const {
  constexpr std::size_t kMessageHead = 4;
  const std::byte* const record = in_.data();
  const std::size_t content = sealed_bytes(record);
  if (record[0] != kHandshake || content < kMessageHead) return false;
  const std::byte* const length = record + kRecordHead + 1;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < 3; ++i) bytes = bytes << 8 | std::to_integer<std::size_t>(length[i]);
  return kMessageHead + bytes <= content;
}

// RFC 9266 except for the label, which is moolink's own.
bool TlsStream::export_binding() {
  constexpr std::string_view kLabel = "EXPORTER-moolink-greeting";
  return openssl_.ssl_export(ssl_, reinterpret_cast<unsigned char*>(binding_.data()),
                             binding_.size(), kLabel.data(), kLabel.size(), nullptr, 0, 0) == 1;
}

// Allocates the bulk buffers only now: the other side has proved that it has the key.
void TlsStream::open() {
  open_ = true;
  record_.grow(kSentBytes);
  out_.grow(kRoomToSend + kSegment);
  in_.grow(kIncoming);
}

std::string TlsStream::first_reason() const {
  const unsigned long error = openssl_.first_error();
  const char* text = error == 0 ? nullptr : openssl_.error_reason(error);
  return text == nullptr ? "OpenSSL gives no reason" : text;
}

void TlsStream::handshake_failed() {
  if (not_tls_) not_tls();
  if (socket_ended_ || socket_error_ != 0) {
    throw HandshakeFailure(ErrorCode::peer_lost,
                           socket_ended_ ? "it has closed it before both were sure of each other"
                                         : std::strerror(socket_error_));
  }
  key_ ? refused_by_acceptor() : dialler_refused();
}

// At a dialler: the answer is no TLS, or an alert.
void TlsStream::refused_by_acceptor() {
  const unsigned long reason = openssl_.first_error() & kReasonMask;
  const std::string text = first_reason();
  const bool alerted = reason >= kFirstAlert && reason <= kLastAlert;
  throw HandshakeFailure(
      ErrorCode::auth, alerted ? "it refuses the " + crypto::describe_identity(identity_) + " (" +
                                     text + "): " + kSameToken
                               : "the TLS handshake failed: " + text + "; is that a moolink peer?");
}

void TlsStream::dialler_refused() {
  const unsigned long reason = openssl_.first_error() & kReasonMask;
  const std::string text = first_reason();
  const std::string shown = crypto::describe_identity(identity_);
  if (identity_.empty()) {
    push();  // the alert
    throw HandshakeFailure(ErrorCode::auth, "it names no key in its TLS handshake: " + text);
  }
  if (!known_) {
    // Replaces the alert, which says less, by the acceptable keys.
    out_.clear();
    HandshakeFailure failure(
        ErrorCode::auth, "it shows " + shown + ", which this peer does not hold: " + kSameToken);
    for (const std::string& identity : context_->keyring_.identities()) {
      failure.answer += (failure.answer.empty() ? "" : " ") + identity;
    }
    throw failure;
  }
  push();
  throw HandshakeFailure(ErrorCode::auth, reason == kWrongBinder
                                              ? "it names " + shown + " and does not have it"
                                              : "the TLS handshake failed: " + text);
}

// The other side does not use TLS. A refusal in plain may tell the dialler which keys the acceptor
// holds.
void TlsStream::not_tls() {
  constexpr const char* kPlain =
      "it does not encrypt: it is not a moolink peer, was made with insecure=True, or finds no "
      "OpenSSL (`moolink doctor` there says why)";
  if (!key_) {
    HandshakeFailure failure(ErrorCode::auth, kPlain);
    failure.answer =
        "this peer takes encrypted connections only (TLS): the one that connects was made with "
        "insecure=True, or finds no OpenSSL (`moolink doctor` there says why)";
    throw failure;
  }
  const wire::Refuse refusal = plain_refusal().value_or(wire::Refuse{});
  std::string holds;
  std::optional<crypto::Key> key_there = key_named(refusal.text, holds);
  Error error = make_error(ErrorCode::auth, kPlain);
  if (is_name(refusal.name)) error.peer = refusal.name;
  const std::string who = error.peer.empty() ? "it" : "peer '" + error.peer + "'";
  if (!holds.empty()) {
    error.message = who + " holds " + holds + " and no other: " + kSameToken;
  } else if (!refusal.text.empty()) {
    error.message = who + " does not encrypt: " + in_one_line(refusal.text);
  }
  HandshakeFailure failure(std::move(error));
  failure.key_there = std::move(key_there);
  throw failure;
}

std::optional<wire::Refuse> TlsStream::plain_refusal() const {
  const std::span<const std::byte> bytes(in_.data(), in_.size());
  if (bytes.size() < wire::kHeaderBytes) return std::nullopt;
  try {
    Limits limits;
    limits.max_frame = kMostRefusal;
    const wire::FrameHeader header = wire::decode_header(bytes.first<wire::kHeaderBytes>(), limits);
    if (header.type != wire::FrameType::refuse || header.control != header.length ||
        bytes.size() < wire::kHeaderBytes + header.length) {
      return std::nullopt;
    }
    return wire::decode<wire::Refuse>(bytes.subspan(wire::kHeaderBytes, header.control));
  } catch (const Exception&) {
    return std::nullopt;  // no frame
  }
}

// The key, of those held here, that the acceptor has named in its refusal; `holds` lists those it
// named. Nothing in it is trusted except as the key to try.
std::optional<crypto::Key> TlsStream::key_named(std::string_view identities,
                                                std::string& holds) const {
  std::optional<crypto::Key> found;
  while (!identities.empty()) {
    const std::string_view identity = identities.substr(0, identities.find(' '));
    identities.remove_prefix(std::min(identity.size() + 1, identities.size()));
    if (!crypto::scope_of(identity)) return std::nullopt;  // a refusal for another reason
    if (!holds.empty()) holds += " and ";
    holds += crypto::describe_identity(identity);
    if (!found && identity != identity_) found = context_->keyring_.find(identity);
  }
  return found;
}

// --- OpenSSL's callbacks

int TlsStream::write_records(Bio* bio, const char* data, std::size_t size, std::size_t* written) {
  if (!stream_of(bio).take_records(data, size)) return 0;
  *written = size;
  return 1;
}

int TlsStream::read_records(Bio* bio, char* data, std::size_t size, std::size_t* read) {
  TlsStream& stream = stream_of(bio);
  const OpenSsl& openssl = stream.openssl_;
  openssl.bio_clear_flags(bio, kRetryFlags);
  *read = stream.give_records(data, size);
  if (*read > 0) return 1;
  // During a turn the loop's thread writes the socket's state: it is read only before open_.
  const bool over = !stream.open_ && (stream.not_tls_ || stream.socket_is_over());
  if (!over) openssl.bio_set_flags(bio, kRetryRead);
  return 0;
}

long TlsStream::control(Bio* bio, int command, long /*number*/, void* /*pointer*/) {
  if (command == kFlush) return 1;
  if (command == kAtEnd) return stream_of(bio).socket_ended_ ? 1 : 0;
  return 0;
}

bool TlsStream::take_records(const char* data, std::size_t size) {
  if (out_.left() < size) return false;  // longer than any handshake, or one alert too many
  out_.add(data, size);
  return true;
}

// 0: nothing is available now. After the handshake OpenSSL gets whole records only, so that in_
// begins with one between two calls.
std::size_t TlsStream::give_records(char* data, std::size_t size) {
  if (open_) {
    if (record_left_ == 0 && has_record()) record_left_ = kRecordHead + sealed_bytes(in_.data());
    size = std::min(size, record_left_);
    if (size == 0) return 0;
    record_left_ -= size;
  } else if (in_.empty()) {
    if (socket_empty_ || socket_ended_ || socket_error_ != 0) return 0;
    may_read_ = kMostGreeting;
    read_ahead();
    if (not_tls_) return 0;
  }
  const std::size_t count = std::min(size, in_.size());
  if (count > 0) std::memcpy(data, in_.data(), count);
  in_.begin += count;
  return count;
}

}  // namespace moolink::transport::tcp
