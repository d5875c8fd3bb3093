#include "collective/hosts.h"

#include <algorithm>
#include <map>

namespace moolink::collective {

Hosts hosts_of(const std::vector<Uid>& keys, const std::vector<std::uint32_t>& guests) {
  Hosts hosts;
  std::map<Uid, std::uint32_t> numbers;
  for (std::uint32_t rank = 0; rank < keys.size(); ++rank) {
    if (std::ranges::find(guests, rank) != guests.end()) {
      hosts.of.push_back(0);
      continue;
    }
    std::uint32_t host = hosts.count();
    if (!keys[rank].empty()) host = numbers.emplace(keys[rank], host).first->second;
    if (host == hosts.count()) hosts.ranks.emplace_back();
    hosts.of.push_back(host);
    hosts.ranks[host].push_back(rank);
  }
  const auto fewer = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  const auto least = std::ranges::min_element(hosts.ranks, fewer);
  if (least != hosts.ranks.end()) hosts.lanes = static_cast<std::uint32_t>(least->size());
  hosts.guests.resize(hosts.count());
  for (std::uint32_t i = 0; i < guests.size(); ++i) {
    hosts.of[guests[i]] = i % hosts.count();
    hosts.guests[i % hosts.count()].push_back(guests[i]);
  }
  return hosts;
}

bool Hosts::share_memory() const {
  const auto has_several = [](const auto& there) { return there.size() > 1; };
  const auto has_some = [](const auto& there) { return !there.empty(); };
  return std::ranges::any_of(ranks, has_several) &&
         (count() > 1 || std::ranges::any_of(guests, has_some));
}

std::uint32_t Hosts::place(std::uint32_t rank) const {
  const std::vector<std::uint32_t>& there = ranks[of[rank]];
  return static_cast<std::uint32_t>(std::ranges::find(there, rank) - there.begin());
}

std::optional<std::uint32_t> Hosts::lane(std::uint32_t rank) const {
  const std::uint32_t at = place(rank);
  return at < lanes ? std::optional(at) : std::nullopt;
}

bool share_a_host(const std::vector<Uid>& keys) {
  return !keys.empty() && !keys.front().empty() &&
         std::count(keys.begin(), keys.end(), keys.front()) == std::ssize(keys);
}

}  // namespace moolink::collective
