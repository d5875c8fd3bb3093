#include "transport/shm/grant_filler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/streaming_copy.h"

namespace moolink::transport::shm {

void GrantFiller::begin(const wire::GrantPlace& place, MutableBuffer target, Buffer bytes) {
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

}  // namespace moolink::transport::shm
