#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace moolink::collective {

// How often operations of each name were started in an epoch: the number distinguishes them.
//
// Names may be new each time (f"stats {n}"), so the names started longest ago are forgotten and
// begin at 0 again. Members that start the same operations in one order forget the same names. With
// threads that start them in different orders, a number differs between members only if its name
// returns after exactly that many others.
class NameCounts {
 public:
  static constexpr std::size_t kMost = std::size_t{1} << 17;  // 20 MB, with short names

  explicit NameCounts(std::size_t most = kMost) : most_(most) {}
  NameCounts(const NameCounts&) = delete;
  NameCounts& operator=(const NameCounts&) = delete;
  // The views stay valid: nodes of a list do not move.
  NameCounts(NameCounts&&) = default;
  NameCounts& operator=(NameCounts&&) = default;

  // The number of an operation of this name that starts now.
  std::uint64_t start(const std::string& name) {
    auto found = by_name_.find(name);
    if (found == by_name_.end()) {
      if (counts_.size() >= most_) {
        by_name_.erase(counts_.front().first);
        counts_.pop_front();
      }
      counts_.emplace_back(name, 0);
      found = by_name_.emplace(counts_.back().first, std::prev(counts_.end())).first;
    } else {
      counts_.splice(counts_.end(), counts_, found->second);
    }
    return found->second->second++;
  }
  // How many were started, as far as remembered.
  std::uint64_t started(const std::string& name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? 0 : found->second->second;
  }
  std::size_t size() const { return counts_.size(); }
  void clear() {
    by_name_.clear();
    counts_.clear();
  }

 private:
  using Counts = std::list<std::pair<std::string, std::uint64_t>>;  // the last started is last

  std::size_t most_;
  Counts counts_;
  std::unordered_map<std::string_view, Counts::iterator> by_name_;
};

}  // namespace moolink::collective
