#include "wire/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
#define MOOLINK_CRC32C_SSE42 1
#endif

namespace moolink::wire {
namespace {

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t sum = i;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) != 0 ? 0x82f63b78U : 0U);
    table[i] = sum;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kTable = make_table();

#ifdef MOOLINK_CRC32C_SSE42
#ifdef __clang__
#define MOOLINK_SSE42 __attribute__((target("sse4.2,crc32")))
#else
#define MOOLINK_SSE42 __attribute__((target("sse4.2")))  // of which crc32 is a part for GCC
#endif
MOOLINK_SSE42 std::uint32_t crc32c_sse42(std::span<const std::byte> bytes, std::uint32_t seed) {
  std::uint64_t sum = ~seed;
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, sizeof word);
    sum = _mm_crc32_u64(sum, word);
  }
  auto narrow = static_cast<std::uint32_t>(sum);
  for (; left != 0; --left, ++at) narrow = _mm_crc32_u8(narrow, static_cast<unsigned char>(*at));
  return ~narrow;
}
#endif

}  // namespace

std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t seed) {
  std::uint32_t sum = ~seed;
  for (const std::byte byte : bytes) {
    sum = (sum >> 8) ^ kTable[(sum ^ static_cast<std::uint32_t>(byte)) & 0xff];
  }
  return ~sum;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) {
#ifdef MOOLINK_CRC32C_SSE42
  static const bool hardware = __builtin_cpu_supports("sse4.2") != 0;
  if (hardware) return crc32c_sse42(bytes, seed);
#endif
  return crc32c_table(bytes, seed);
}

}  // namespace moolink::wire
