#include "crypto/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"

namespace moolink::crypto {

namespace {

constexpr std::array<std::uint32_t, 64> kRounds{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_big_endian(const std::byte* from) {
  return std::to_integer<std::uint32_t>(from[0]) << 24 |
         std::to_integer<std::uint32_t>(from[1]) << 16 |
         std::to_integer<std::uint32_t>(from[2]) << 8 | std::to_integer<std::uint32_t>(from[3]);
}

void store_big_endian(std::uint64_t value, std::span<std::byte> to) {
  for (std::size_t i = to.size(); i-- > 0; value >>= 8) to[i] = static_cast<std::byte>(value);
}

}  // namespace

// The names are those of the standard: a..h the working variables, w the message schedule.
void Sha256::compress(const std::byte* block) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t t = 0; t < 16; ++t) w[t] = load_big_endian(block + 4 * t);
  for (std::size_t t = 16; t < 64; ++t) {
    const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t t = 0; t < 64; ++t) {
    const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t choice = (e & f) ^ (~e & g);
    const std::uint32_t t1 = h + sum1 + choice + kRounds[t] + w[t];
    const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + sum0 + majority;
  }
  const std::array<std::uint32_t, 8> worked{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state_[i] += worked[i];
}

void Sha256::update(Bytes bytes) {
  length_ += bytes.size();
  while (!bytes.empty()) {
    const std::size_t part = std::min(bytes.size(), kBlock - filled_);
    std::memcpy(block_.data() + filled_, bytes.data(), part);
    filled_ += part;
    bytes = bytes.subspan(part);
    if (filled_ < kBlock) return;
    compress(block_.data());
    filled_ = 0;
  }
}

// A one bit, zeros, and the length in bits fill the last block.
Digest Sha256::finish() {
  const std::uint64_t bits = length_ * 8;
  static constexpr std::array<std::byte, kBlock> kPadding{std::byte{0x80}};
  const std::size_t padding = (filled_ < 56 ? 56 : 120) - filled_;
  update(Bytes(kPadding).first(padding));
  std::array<std::byte, 8> length;
  store_big_endian(bits, length);
  update(length);
  Digest digest;
  for (std::size_t i = 0; i < 8; ++i)
    store_big_endian(state_[i], std::span(digest).subspan(4 * i, 4));
  return digest;
}

Digest sha256(Bytes message) {
  Sha256 hash;
  hash.update(message);
  return hash.finish();
}

Digest hmac_sha256(Bytes key, Bytes message) {
  std::array<std::byte, 64> block{};
  const Digest short_key = key.size() > block.size() ? sha256(key) : Digest{};
  if (key.size() > block.size()) key = short_key;
  std::copy(key.begin(), key.end(), block.begin());
  for (std::byte& byte : block) byte ^= std::byte{0x36};
  Sha256 inner;
  inner.update(block);
  inner.update(message);
  for (std::byte& byte : block) byte ^= std::byte{0x36 ^ 0x5c};
  Sha256 outer;
  outer.update(block);
  outer.update(inner.finish());
  return outer.finish();
}

std::vector<std::byte> hkdf_expand(Bytes secret, Bytes info, std::size_t length) {
  if (length > 255 * sizeof(Digest)) {
    throw Exception(ErrorCode::invalid_argument, "HKDF gives at most 255 blocks");
  }
  std::vector<std::byte> output;
  std::vector<std::byte> message;
  for (std::uint8_t counter = 1; output.size() < length; ++counter) {
    message.insert(message.end(), info.begin(), info.end());
    message.push_back(std::byte{counter});
    const Digest block = hmac_sha256(secret, message);
    output.insert(output.end(), block.begin(), block.end());
    message.assign(block.begin(), block.end());
  }
  output.resize(length);
  return output;
}

std::vector<std::byte> hkdf_sha256(Bytes secret, Bytes salt, Bytes info, std::size_t length) {
  return hkdf_expand(hmac_sha256(salt, secret), info, length);
}

bool equal(Bytes a, Bytes b) {
  if (a.size() != b.size()) return false;
  std::byte difference{};
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference |= a[i] ^ b[i];
    // Without this a compiler may leave the loop at the first difference.
    asm volatile("" : "+r"(difference));
  }
  return difference == std::byte{};
}

}  // namespace moolink::crypto
