#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "memory/segment_pool.h"
#include "transport/transport.h"

namespace moolink::transport {

// The memory that one peer may fill, in segments made here and passed to that peer only. After the
// connection has ended (close()) no block is ever reused: the peer may be stopped in the middle of
// a copy, and continue it at any time. After a fork each side may write its arrays.
class GrantPool final : public memory::SegmentPool {
 public:
  static constexpr std::size_t kSmallestBlock = std::size_t{64} << 10;
  static constexpr std::size_t kLargestBlock = std::size_t{1} << 36;
  static constexpr std::size_t kSegmentBytes = std::size_t{4} << 20;
  static constexpr std::size_t kMaxFreeBytes = std::size_t{256} << 20;

  GrantPool()
      : SegmentPool({.smallest_block = kSmallestBlock,
                     .largest_block = kLargestBlock,
                     .segment_bytes = kSegmentBytes,
                     .max_free = kMaxFreeBytes,
                     .label = "moolink-grants",
                     .lent = false}) {}

  // nullopt: too large, the pool is closed, or the system has no memory.
  std::optional<Grant> allocate(std::size_t bytes);

 private:
  std::uint64_t last_grant_ = 0;
};

}  // namespace moolink::transport
