#pragma once

// SHA-256 (FIPS 180-4), with HMAC (RFC 2104) and HKDF (RFC 5869). Own code because peers of one
// host must be able to authenticate without OpenSSL, which is loaded at run time and used for tcp
// only. It runs a few times per connection and never on a user's bytes.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace moolink::crypto {

using Bytes = std::span<const std::byte>;
using Digest = std::array<std::byte, 32>;

inline Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

class Sha256 {
 public:
  void update(Bytes bytes);
  Digest finish();  // once, last

 private:
  static constexpr std::size_t kBlock = 64;

  void compress(const std::byte* block);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlock> block_{};
  std::size_t filled_ = 0;  // bytes of block_ in use
  std::uint64_t length_ = 0;
};

Digest sha256(Bytes message);
Digest hmac_sha256(Bytes key, Bytes message);

// HKDF's second step alone, for a uniformly random secret: `length` bytes, at most 255 * 32.
std::vector<std::byte> hkdf_expand(Bytes secret, Bytes info, std::size_t length);
// Both steps.
std::vector<std::byte> hkdf_sha256(Bytes secret, Bytes salt, Bytes info, std::size_t length);

// Whether both are the same, in a time that depends only on their sizes.
bool equal(Bytes a, Bytes b);

}  // namespace moolink::crypto
