#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/time.h"
#include "crypto/keyring.h"
#include "transport/tcp/byte_stream.h"
#include "transport/tcp/openssl.h"
#include "wire/frame.h"

namespace moolink::transport::tcp {

inline constexpr const char* kTlsCipher = "TLS_AES_128_GCM_SHA256";
// An AES-GCM key is good for 2^24.5 records (RFC 8446, 5.5).
inline constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 23;

inline constexpr std::size_t kRecordBytes = 16384;  // of plain text in one record, at most
inline constexpr std::size_t kRecordHead = 5;
inline constexpr std::size_t kRecordTail = 17;  // the type, encrypted too, and the tag
// Size of a record after its head.
std::size_t sealed_bytes(const std::byte* head);

// Whether a connection that begins with this byte is TLS; frames begin with their type.
bool begins_tls(std::byte first);

// Shared by the TLS connections of one transport: TLS 1.3 with an external key that both sides
// hold, one cipher, an ephemeral key exchange, no certificates, tickets or early data.
class TlsContext {
 public:
  // Throws Exception{error} with OpenSSL's reason.
  explicit TlsContext(crypto::Keyring keyring, std::uint64_t records_per_key = kRecordsPerKey);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsStream;

  static int use_key(Ssl* ssl, const DigestMethod* digest, const unsigned char** identity,
                     std::size_t* size, SslSession** session);
  static int find_key(Ssl* ssl, const unsigned char* identity, std::size_t size,
                      SslSession** session);
  SslSession* session_of(Ssl* ssl, const crypto::Key& key) const;
  void configure();

  const OpenSsl& openssl_;
  const crypto::Keyring keyring_;
  const std::uint64_t records_per_key_;
  SslContext* context_ = nullptr;
  BioMethod* bio_method_ = nullptr;
};

// The settings of turns: work of a stream on another thread.
struct TlsTurns {
  // Runs `work` on that thread, then turned() on the loop's thread. Throws if there is no thread.
  // Null: the stream takes no turns.
  std::function<void(std::function<void()> work)> run;
  std::size_t least = std::size_t{64} << 10;  // bytes; fewer take no turn
};

// Memory of a stream, allocated on first use: there may be many unauthenticated connections.
struct TlsRoom {
  std::unique_ptr<std::byte[]> memory;
  std::size_t bytes = 0;
  std::size_t begin = 0;  // offset of its bytes
  std::size_t end = 0;

  std::byte* data() const { return memory.get() + begin; }
  std::size_t size() const { return end - begin; }
  bool empty() const { return begin == end; }
  std::size_t left() const { return bytes - end; }
  std::span<std::byte> rest() const { return {memory.get() + end, left()}; }
  void clear() { begin = end = 0; }
  void grow(std::size_t wanted);
  void add(const void* data, std::size_t size);
  // Moves the bytes to the start of the memory.
  void pack();
};

// A TLS connection. OpenSSL makes the records over moolink's BIO, which collects records: one
// system call sends, or receives, many.
//
// With `turns`, large transfers take turns: another thread encrypts outgoing bytes and decrypts
// records, while this thread exchanges the bytes of the previous and the next turn with the socket
// and the user. OpenSSL's object and the buffers of a turn belong to that thread until turned().
class TlsStream final : public ByteStream {
 public:
  // key: the one a dialler offers; none: this side accepts.
  TlsStream(std::shared_ptr<TlsContext> context, int socket, std::optional<crypto::Key> key,
            TlsTurns turns = {});
  ~TlsStream() override;

  std::string_view cipher() const override { return kTlsCipher; }
  wire::ChannelBinding binding() const override { return binding_; }
  bool shake_hands() override;
  Sent send(std::span<const iovec> pieces) override;
  bool unsent() const override { return !sending_.empty() || (!busy_ && !out_.empty()); }
  Received receive(std::span<const iovec> pieces, std::size_t allowance) override;
  bool holds_bytes() const override;
  bool busy() const override { return busy_; }
  void turned() override;
  bool takes_input() const override {
    return !busy_ || (arriving_.left() > 0 && !socket_is_over());
  }
  bool shut_down() override;

 private:
  friend class TlsContext;

  static int write_records(Bio* bio, const char* data, std::size_t size, std::size_t* written);
  static int read_records(Bio* bio, char* data, std::size_t size, std::size_t* read);
  static long control(Bio* bio, int command, long number, void* pointer);
  // tls_handshake.cc
  void begin();
  bool may_begin();
  bool begins_with_whole_message() const;
  bool take_records(const char* data, std::size_t size);
  std::size_t give_records(char* data, std::size_t size);
  bool export_binding();
  void open();
  std::string first_reason() const;
  [[noreturn]] void handshake_failed();
  [[noreturn]] void refused_by_acceptor();
  [[noreturn]] void dialler_refused();
  [[noreturn]] void not_tls();
  std::optional<wire::Refuse> plain_refusal() const;
  std::optional<crypto::Key> key_named(std::string_view identities, std::string& holds) const;

  // tls_stream.cc
  void push();
  std::size_t sealed_together(std::size_t left) const;
  void seal(std::span<const iovec> pieces);
  bool has_record() const;
  bool has_more() const;
  std::size_t read_record(std::span<std::byte> into);
  std::size_t read_at_once(std::span<std::byte> into);
  bool read_more();
  bool socket_is_over() const { return socket_ended_ || socket_error_ != 0; }
  void check_socket() const;
  void read_ahead();
  void read_socket(TlsRoom& room);
  // tls_turns.cc
  std::size_t fill_turn(std::span<const iovec> pieces);
  void begin_turn();
  void turn() noexcept;
  void show_opened();
  void join_arrived();
  std::size_t take_opened(std::span<std::byte> into);

  static constexpr std::size_t kMostSealed = kRecordHead + kRecordBytes + 256;
  // Bytes in one record. Four records fill a segment of loopback (65,483 bytes over IPv4, 65,464
  // over IPv6): the excess of four full ones would travel as a segment of its own.
  static constexpr std::size_t kSentBytes = 16'320;
  static constexpr std::size_t kSegment = 4 * (kRecordHead + kSentBytes + kRecordTail);
  static constexpr std::size_t kRoomToSend = 4 * kMostSealed;  // beyond that, also for KeyUpdates
  static constexpr std::size_t kIncoming = (std::size_t{128} << 10) + kMostSealed;
  static constexpr std::size_t kSealedInTurn = 16 * kSentBytes;  // encrypted in one turn at most

  const std::shared_ptr<TlsContext> context_;
  const OpenSsl& openssl_;
  const int socket_;
  const std::optional<crypto::Key> key_;
  Ssl* ssl_ = nullptr;
  std::string identity_;  // that the dialler offers
  bool known_ = false;    // at the acceptor: its key is held here
  bool open_ = false;     // the handshake is done
  wire::ChannelBinding binding_{};

  // Outgoing records.
  TlsRoom record_;             // the pieces of one record
  std::uint64_t records_ = 0;  // since seal() last changed the key
  TlsRoom out_;
  std::size_t burst_ = 0;       // bytes sent without a pause
  Time pause_begins_ = kNever;  // since all of them were sent; kNever: they were not
  bool close_notify_sent_ = false;

  // Records, and the beginning of one, read from the socket.
  TlsRoom in_;
  bool begun_ = false;         // the first byte has arrived
  bool not_tls_ = false;       // ... and is not TLS
  std::size_t may_read_ = 0;   // bytes from the socket, in this call
  bool socket_empty_ = false;  // by the last read
  bool socket_ended_ = false;
  int socket_error_ = 0;
  std::size_t record_left_ = 0;  // bytes, of the record that OpenSSL reads
  int without_data_ = 0;         // consecutive reads
  bool closed_ = false;          // the peer announced it

  // Turns on another thread.
  const TlsTurns turns_;
  bool busy_ = false;
  TlsRoom to_seal_;
  TlsRoom sending_;   // records of an earlier turn, sent before out_
  TlsRoom arriving_;  // records read during a turn, behind room for the beginning of one
  TlsRoom opening_;   // bytes that the turn has decrypted
  TlsRoom opened_;    // bytes that an earlier turn has decrypted, for the user
  std::optional<Error> failure_;  // reported after the bytes decrypted before it
};

}  // namespace moolink::transport::tcp
