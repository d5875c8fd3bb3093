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
constexpr std::size_t kPage = 4096;
constexpr std::size_t kPages = 4;  // copied side by side
constexpr std::size_t kLines = 4;  // copied of one page before the next page

void copy_line(std::byte* to, const std::byte* from) {
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  const __m128i first = _mm_loadu_si128(source);
  const __m128i second = _mm_loadu_si128(source + 1);
  const __m128i third = _mm_loadu_si128(source + 2);
  const __m128i fourth = _mm_loadu_si128(source + 3);
  _mm_stream_si128(target, first);
  _mm_stream_si128(target + 1, second);
  _mm_stream_si128(target + 2, third);
  _mm_stream_si128(target + 3, fourth);
}

// Processors prefetch within a page, so they prefetch more lines of several pages at once.
void copy_pages(std::byte* to, const std::byte* from) {
  for (std::size_t at = 0; at < kPage; at += kLines * kLine) {
    for (std::size_t page = 0; page < kPages; ++page) {
      const std::size_t begin = page * kPage + at;
      for (std::size_t line = 0; line < kLines; ++line) {
        copy_line(to + begin + line * kLine, from + begin + line * kLine);
      }
    }
  }
}

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t size) {
  std::size_t at = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, at);
  for (; size - at >= kPages * kPage; at += kPages * kPage) copy_pages(to + at, from + at);
  for (; size - at >= kLine; at += kLine) copy_line(to + at, from + at);
  std::memcpy(to + at, from + at, size - at);
  _mm_sfence();  // before any store that announces the copy
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
