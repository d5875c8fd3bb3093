#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/uid.h"

namespace moolink::runtime {

// Descriptors that peers of this host shared, by key. They arrive through a socket, and the message
// with their key through a ring: either may be first. With the engine's lock held.
class DescriptorExchange {
 public:
  using Taker = std::function<void(std::vector<Descriptor>)>;

  // Called once, now or when they arrive.
  void expect(const Uid& key, Taker taker);
  void forget(const Uid& key);
  void arrived(const Uid& key, std::vector<Descriptor> descriptors);
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
