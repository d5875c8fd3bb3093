#include "transport/shm/lending.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "transport/shm/notice.h"

namespace moolink::transport::shm {

bool LentSegments::pass(int socket, std::uint64_t number, std::size_t most) {
  if (passed_.contains(number)) return true;
  if (pool_ == nullptr || passed_.size() >= most) return false;
  const auto segment = pool_->segment(number);
  if (segment == nullptr) return false;
  const int descriptor = segment->descriptor();
  const Notice lend{.kind = NoticeKind::lend, .segment = number};
  if (!try_send_notice(socket, lend, {&descriptor, 1})) return false;
  passed_.insert(number);
  return true;
}

void LentSegments::tell_retired(int socket) {
  const std::uint64_t seen = pool_->retired();
  for (auto passed = passed_.begin(); passed != passed_.end();) {
    if (pool_->segment(*passed) != nullptr) {
      ++passed;
      continue;
    }
    const Notice unlend{.kind = NoticeKind::unlend, .segment = *passed};
    if (!try_send_notice(socket, unlend, {})) return;
    passed = passed_.erase(passed);
  }
  seen_ = seen;
}

void BorrowedSegments::add(std::uint64_t number, Descriptor descriptor) {
  if (segments_.contains(number) || segments_.size() >= kMaxSegments) {
    throw Exception(ErrorCode::wire, "a peer lent segment " + std::to_string(number) +
                                         " twice, or more segments than are allowed");
  }
  segments_.emplace(number, memory::BorrowedSegment::map(std::move(descriptor),
                                                         memory::LendingPool::kLargestBlock));
}

void BorrowedSegments::remove(std::uint64_t number) {
  if (segments_.erase(number) == 0) {
    throw Exception(ErrorCode::wire,
                    "a peer took back segment " + std::to_string(number) + ", which it never lent");
  }
}

Buffer BorrowedSegments::at(const wire::LoanPlace& place) {
  const auto found = segments_.find(place.segment);
  if (found == segments_.end()) {
    throw Exception(ErrorCode::wire, "a loan lies in segment " + std::to_string(place.segment) +
                                         ", which the peer never lent");
  }
  if (auto next = found->second->successor()) found->second = std::move(next);
  memory::BorrowedSegment& segment = *found->second;
  if (place.offset > segment.size() || place.bytes > segment.size() - place.offset) {
    throw Exception(ErrorCode::wire, "a loan of " + std::to_string(place.bytes) + " bytes at " +
                                         std::to_string(place.offset) +
                                         " is not within its segment of " +
                                         std::to_string(segment.size()) + " bytes");
  }
  return segment.buffer(place.offset, static_cast<std::size_t>(place.bytes));
}

}  // namespace moolink::transport::shm
