#pragma once

// Records of TLS as who holds the key can make them, whatever their type and length.

#include <cstddef>
#include <span>
#include <vector>

#include "transport/tcp/tls_record.h"

namespace moolink::transport {

inline std::vector<std::byte> sealed_record(tcp::RecordCipher& sealer, tcp::RecordType type,
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
