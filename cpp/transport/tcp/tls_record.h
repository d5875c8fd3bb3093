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

// Size of a record after its head.
inline std::size_t sealed_bytes(const std::byte* head) {
  return std::to_integer<std::size_t>(head[3]) << 8 | std::to_integer<std::size_t>(head[4]);
}

// Protects the records of one direction after the handshake (RFC 8446, 5.2 to 5.4, 7.2 and 7.3)
// with OpenSSL's AES-128-GCM. OpenSSL's own record layer copies every byte once more at each side,
// and takes a microsecond for each record.
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
  // Opens one whole record into `first`, and the excess into `rest`. False: it does not fit, or it
  // is not authentic; then do not use anything that was written.
  bool open(std::span<const std::byte> record, std::span<std::byte> first,
            std::span<std::byte> rest, RecordType& type);
  // Continues under the next key, like the other side after KeyUpdate.
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
