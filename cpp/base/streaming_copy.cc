#include "base/streaming_copy.h"

#include <unistd.h>

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace moolink {
namespace {

// Source and target of a transfer this large fill half of the last cache.
std::size_t cached_bytes() {
  constexpr std::size_t kUsual = std::size_t{8} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (cache > 0) return static_cast<std::size_t>(cache) / 4;
#endif
  return kUsual;
}

#if defined(__SSE2__)
constexpr std::size_t kLine = 64;
constexpr std::size_t kAhead = 16 * kLine;

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t size) {
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  const std::size_t end = head + (size - head) / kLine * kLine;
  for (std::size_t at = head; at < end; at += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    _mm_prefetch(reinterpret_cast<const char*>(from + at + kAhead), _MM_HINT_NTA);
    const __m128i first = _mm_loadu_si128(source);
    const __m128i second = _mm_loadu_si128(source + 1);
    const __m128i third = _mm_loadu_si128(source + 2);
    const __m128i fourth = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, first);
    _mm_stream_si128(target + 1, second);
    _mm_stream_si128(target + 2, third);
    _mm_stream_si128(target + 3, fourth);
  }
  std::memcpy(to + end, from + end, size - end);
  _mm_sfence();  // before any store that tells others of it
}
#endif

}  // namespace

void streaming_copy(std::span<std::byte> to, std::span<const std::byte> from, std::size_t whole) {
  if (from.empty()) return;  // the pointers may be null then
#if defined(__SSE2__)
  static const std::size_t cached = cached_bytes();
  constexpr std::size_t kLeast = 4096;
  if (whole > cached && from.size() >= kLeast) {
    return copy_past_cache(to.data(), from.data(), from.size());
  }
#endif
  std::memcpy(to.data(), from.data(), from.size());
}

}  // namespace moolink
