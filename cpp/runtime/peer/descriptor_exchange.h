#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/thread_safety.h"
#include "base/uid.h"

namespace moolink::runtime {

// Descriptors that peers of this host shared, by key. They arrive through a socket, and the message
// with their key through a ring: either may be first.
class DescriptorExchange {
 public:
  using Taker = std::function<void(std::vector<Descriptor>)>;

  // Called once, now or when they arrive.
  void expect(const Uid& key, Taker taker) MOOLINK_LOCKED {
    const auto found =
        std::ranges::find_if(unclaimed_, [&](const auto& entry) { return entry.first == key; });
    if (found == unclaimed_.end()) {
      takers_[key] = std::move(taker);
      return;
    }
    std::vector<Descriptor> descriptors = std::move(found->second);
    unclaimed_.erase(found);
    taker(std::move(descriptors));
  }
  void forget(const Uid& key) MOOLINK_LOCKED {
    takers_.erase(key);
    std::erase_if(unclaimed_, [&](const auto& entry) { return entry.first == key; });
  }
  void arrived(const Uid& key, std::vector<Descriptor> descriptors) MOOLINK_LOCKED {
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
  // In a forked child.
  void abandon() noexcept { unclaimed_.clear(); }

 private:
  // Descriptors not requested yet; the oldest are closed when there are more.
  static constexpr std::size_t kMaxUnclaimed = 16;
  static constexpr std::size_t kMaxDescriptors = 160;  // two sets of the largest segment's

  std::map<Uid, Taker> takers_;
  std::deque<std::pair<Uid, std::vector<Descriptor>>> unclaimed_;
};

}  // namespace moolink::runtime
