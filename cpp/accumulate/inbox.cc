#include "accumulate/inbox.h"

#include <iterator>
#include <utility>

namespace moolink::accumulate {
namespace {

constexpr std::size_t kMostEarly = 65536;

}  // namespace

void Inbox::keep_early(Inbound inbound) {
  if (early_.size() >= kMostEarly || inbound.bytes > most_bytes_ - early_bytes_) return;
  early_bytes_ += inbound.bytes;
  early_.push_back(std::move(inbound));
}

void Inbox::replay_early(std::uint64_t epoch) {
  auto early = std::exchange(early_, {});
  early_bytes_ = 0;
  std::erase_if(early, [epoch](const Inbound& inbound) { return inbound.envelope.epoch < epoch; });
  queue_.insert(queue_.begin(), std::make_move_iterator(early.begin()),
                std::make_move_iterator(early.end()));
}

Inbound Inbox::pop() {
  Inbound inbound = std::move(queue_.front());
  queue_.pop_front();
  return inbound;
}

}  // namespace moolink::accumulate
