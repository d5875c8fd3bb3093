#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace moolink::wire {

// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78; RFC 3720, appendix B.4). To continue a sum,
// pass the previous result as `seed`.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0);

// The portable form, the reference for tests of the other one.
std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t seed = 0);

}  // namespace moolink::wire
