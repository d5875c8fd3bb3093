#include "runtime/group/bucket_layout.h"

#include <utility>

#include "base/round_up.h"

namespace moolink::runtime {
namespace {

constexpr std::size_t kAlignment = 64;

}  // namespace

BucketLayout::BucketLayout(std::vector<BucketSection> parts) : sections(std::move(parts)) {
  for (const BucketSection& section : sections) {
    offsets.push_back(round_up(bytes, kAlignment));
    bytes = offsets.back() + section.bytes();
  }
}

}  // namespace moolink::runtime
