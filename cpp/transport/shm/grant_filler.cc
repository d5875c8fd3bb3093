#include "transport/shm/grant_filler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/streaming_copy.h"
#include "transport/grant_pool.h"

namespace moolink::transport::shm {

void GrantFiller::add_segment(std::uint64_t number, Descriptor descriptor) {
  if (segments_.contains(number) || segments_.size() >= kMaxSegments) {
    throw Exception(ErrorCode::wire, "a peer passed segment " + std::to_string(number) +
                                         " twice, or more segments than are allowed");
  }
  auto segment = memory::Segment::map(std::move(descriptor), GrantPool::kLargestBlock);
  segment->close_descriptor();
  segments_.emplace(number, std::move(segment));
}

void GrantFiller::retire_segment(std::uint64_t number) {
  if (segments_.erase(number) == 0) {
    throw Exception(ErrorCode::wire,
                    "a peer retired segment " + std::to_string(number) + ", which it never passed");
  }
}

MutableBuffer GrantFiller::memory(const wire::GrantPlace& place) const {
  const auto found = segments_.find(place.segment);
  if (found == segments_.end()) {
    throw Exception(ErrorCode::wire, "a grant lies in segment " + std::to_string(place.segment) +
                                         ", which the peer never passed");
  }
  const std::shared_ptr<memory::Segment>& segment = found->second;
  if (place.offset > segment->size() || place.bytes > segment->size() - place.offset) {
    throw Exception(ErrorCode::wire, "a grant of " + std::to_string(place.bytes) + " bytes at " +
                                         std::to_string(place.offset) +
                                         " is not within its segment");
  }
  return {segment, segment->data() + place.offset, static_cast<std::size_t>(place.bytes)};
}

void GrantFiller::begin(const wire::GrantPlace& place, Buffer bytes) {
  MutableBuffer target = memory(place);
  if (bytes.size() > target.size()) {
    throw Exception(ErrorCode::wire, "a grant of " + std::to_string(place.bytes) +
                                         " bytes for a part of " + std::to_string(bytes.size()));
  }
  jobs_.push_back({std::move(target), place, std::move(bytes)});
}

std::optional<wire::GrantPlace> GrantFiller::step() {
  if (jobs_.empty()) return std::nullopt;
  Job& job = jobs_.front();
  const std::size_t size = std::min(kSliceBytes, job.bytes.size() - job.done);
  streaming_copy(job.target.span().subspan(job.done, size),
                 job.bytes.span().subspan(job.done, size), job.bytes.size());
  job.done += size;
  if (job.done < job.bytes.size()) return std::nullopt;
  const wire::GrantPlace full = job.place;
  jobs_.pop_front();
  return full;
}

void GrantFiller::clear() {
  jobs_.clear();
  segments_.clear();
}

}  // namespace moolink::transport::shm
