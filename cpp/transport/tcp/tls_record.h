#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "crypto/sha256.h"
#include "transport/tcp/openssl.h"

namespace moolink::transport::tcp {

inline constexpr std::size_t kRecordBytes = 16384;  // of plain text in one record, at most
inline constexpr std::size_t kRecordHead = 5;
inline constexpr std::size_t kRecordTail = 17;  // the type, encrypted too, and the tag

enum class RecordType : std::uint8_t { alert = 21, handshake = 22, data = 23 };

// Of a record after its head.
inline std::size_t sealed_bytes(const std::byte* head) {
  return std::to_integer<std::size_t>(head[3]) << 8 | std::to_integer<std::size_t>(head[4]);
}

// Protects the records of one direction after the handshake (RFC 8446, 5.2 to 5.4, 7.2 and 7.3)
// with OpenSSL's AES-128-GCM. OpenSSL's own record layer copies every byte once more at each side,
// and takes a microsecond a record.
class RecordCipher {
 public:
  enum class Way { seal, open };

  // Throws Exception{error}.
  RecordCipher(const OpenSsl& openssl, const crypto::Digest& secret, Way way);
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  // One record of all the pieces, kRecordBytes at most, with head and tail. Returns its end.
  std::byte* seal(RecordType type, std::span<const iovec> pieces, std::byte* out);
  // The content of a record, as whole as it came, into `first`, and what does not fit into `rest`.
  // False: that does not fit either, or it is not what the other side has sent; then nothing that
  // was written is to be used.
  bool open(std::span<const std::byte> record, std::span<std::byte> first,
            std::span<std::byte> rest, RecordType& type);
  // Goes on under the next key, as the other side does after KeyUpdate.
  void next_key();

  std::uint64_t records() const { return sequence_; }  // under the present key

 private:
  void begin(std::span<const std::byte> head);
  void derive();

  const OpenSsl& openssl_;
  const Way way_;
  CipherContext* context_;
  crypto::Digest secret_;
  std::array<std::byte, 12> iv_{};
  std::uint64_t sequence_ = 0;
};

}  // namespace moolink::transport::tcp
