#include "runtime/peer/descriptor_exchange.h"

#include <algorithm>

namespace moolink::runtime {

void DescriptorExchange::expect(const Uid& key, Taker taker) {
  const auto found = std::find_if(unclaimed_.begin(), unclaimed_.end(),
                                  [&](const auto& entry) { return entry.first == key; });
  if (found == unclaimed_.end()) {
    takers_[key] = std::move(taker);
    return;
  }
  std::vector<Descriptor> descriptors = std::move(found->second);
  unclaimed_.erase(found);
  taker(std::move(descriptors));
}

void DescriptorExchange::forget(const Uid& key) {
  takers_.erase(key);
  std::erase_if(unclaimed_, [&](const auto& entry) { return entry.first == key; });
}

void DescriptorExchange::arrived(const Uid& key, std::vector<Descriptor> descriptors) {
  const auto found = takers_.find(key);
  if (found != takers_.end()) {
    const Taker taker = std::move(found->second);
    takers_.erase(found);
    taker(std::move(descriptors));
    return;
  }
  const auto count = [this] {
    std::size_t all = 0;
    for (const auto& entry : unclaimed_) all += entry.second.size();
    return all;
  };
  unclaimed_.emplace_back(key, std::move(descriptors));
  while (unclaimed_.size() > kMaxUnclaimed || count() > kMaxDescriptors) unclaimed_.pop_front();
}

}  // namespace moolink::runtime
