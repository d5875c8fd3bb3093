#pragma once

// TLS records of any type and length, as a peer that has the key can make them.

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "crypto/sha256.h"
#include "transport/tcp/tls.h"

namespace moolink::transport {

enum class RecordType : std::uint8_t { alert = 21, handshake = 22, data = 23 };

struct CipherContext;  // EVP_CIPHER_CTX

// Protects the records of one direction after the handshake (RFC 8446, 5.2 to 5.4, 7.2 and 7.3)
// with OpenSSL's AES-128-GCM. With it a test makes records that OpenSSL would not send.
class RecordCipher {
 public:
  enum class Way { seal, open };

  // Throws Exception{error}.
  RecordCipher(const crypto::Digest& secret, Way way);
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

 private:
  void begin(std::span<const std::byte> head);
  void derive();

  const Way way_;
  CipherContext* context_;
  crypto::Digest secret_;
  std::array<std::byte, 12> iv_{};
  std::uint64_t sequence_ = 0;
};

inline std::vector<std::byte> sealed_record(RecordCipher& sealer, RecordType type,
                                            std::vector<std::byte> content) {
  std::vector<std::byte> record(tcp::kRecordHead + content.size() + tcp::kRecordTail);
  const iovec piece{content.data(), content.size()};
  sealer.seal(type, std::span(&piece, 1), record.data());
  return record;
}

// RFC 8446, 4.6.3. asks: the other side is to change its key, too.
inline std::vector<std::byte> key_update(bool asks) {
  return {std::byte{24}, {}, {}, std::byte{1}, static_cast<std::byte>(asks)};
}

}  // namespace moolink::transport
