#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/uid.h"

namespace moolink::collective {

// The ranks of each host. Hosts are numbered in the order of their lowest ranks. The first ranks of
// a host lead a lane each. There are as many lanes as the host with the fewest ranks has ranks.
//
// Guests are ranks that do not take part in the reduction, on hosts where all ranks are guests. A
// guest gets the result from the leaders of one other host, and `of` names that host.
struct Hosts {
  std::vector<std::uint32_t> of;                  // the host of each rank
  std::vector<std::vector<std::uint32_t>> ranks;  // of each host, rising; the first ones lead lanes
  std::vector<std::vector<std::uint32_t>> guests;  // of each host
  std::uint32_t lanes = 1;

  std::uint32_t count() const { return static_cast<std::uint32_t>(ranks.size()); }
  std::uint32_t leader(std::uint32_t host, std::uint32_t lane) const { return ranks[host][lane]; }
  // The place of this rank among the ranks of its host; for a guest, the number of these ranks.
  std::uint32_t place(std::uint32_t rank) const {
    const std::vector<std::uint32_t>& there = ranks[of[rank]];
    return static_cast<std::uint32_t>(std::ranges::find(there, rank) - there.begin());
  }
  // The lane of this rank; none if it leads none.
  std::optional<std::uint32_t> lane(std::uint32_t rank) const {
    const std::uint32_t at = place(rank);
    return at < lanes ? std::optional(at) : std::nullopt;
  }
  bool is_guest(std::uint32_t rank) const { return place(rank) == ranks[of[rank]].size(); }
  // Whether some host has several ranks and there are other hosts or guests.
  bool share_memory() const {
    const auto has_several = [](const auto& there) { return there.size() > 1; };
    const auto has_some = [](const auto& there) { return !there.empty(); };
    return std::ranges::any_of(ranks, has_several) &&
           (count() > 1 || std::ranges::any_of(guests, has_some));
  }
};

// Groups the ranks by host key; a rank without a key is alone. An observer is a guest if all ranks
// of its host are observers. If all ranks are observers, none is a guest.
inline Hosts hosts_of(const std::vector<Uid>& keys, std::vector<std::uint32_t> observers = {}) {
  Hosts hosts;
  std::map<Uid, std::uint32_t> numbers;
  std::vector<std::uint32_t> guests;
  if (observers.size() == keys.size()) observers.clear();
  const auto observes = [&](std::uint32_t rank) {
    return std::ranges::find(observers, rank) != observers.end();
  };
  std::set<Uid> reducing;  // hosts with a rank that is no observer
  for (std::uint32_t rank = 0; rank < keys.size(); ++rank) {
    if (!observes(rank)) reducing.insert(keys[rank]);
  }
  for (std::uint32_t rank = 0; rank < keys.size(); ++rank) {
    if (observes(rank) && (keys[rank].empty() || !reducing.contains(keys[rank]))) {
      guests.push_back(rank);
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

// The members of one epoch in rank order, and their hosts. The object that decides which members
// take part in the epoch makes this once; all others in this process share it.
struct EpochMembers {
  struct Member {
    Uid instance;
    std::string name;
    Uid host_key = {};      // if no member has one, all are on one host, without shared memory
    bool observer = false;  // passes no inputs
  };

  EpochMembers() = default;
  EpochMembers(std::uint64_t number, std::vector<Member> list)
      : epoch(number), members(std::move(list)) {
    std::vector<Uid> keys;
    std::vector<std::uint32_t> observers;
    for (const Member& member : members) {
      if (member.observer) observers.push_back(static_cast<std::uint32_t>(keys.size()));
      keys.push_back(member.host_key);
    }
    const bool has_keys = std::ranges::any_of(keys, [](const Uid& key) { return !key.empty(); });
    one_host = has_keys && std::ranges::count(keys, keys.front()) == std::ssize(keys);
    hosts = hosts_of(has_keys ? keys : std::vector(keys.size(), Uid{1, 1}), observers);
    alone = hosts_of(std::vector<Uid>(keys.size()), observers);
  }

  std::size_t size() const { return members.size(); }
  const Member& operator[](std::size_t rank) const { return members[rank]; }
  std::optional<std::uint32_t> rank_of(const Uid& instance) const {
    const auto found = std::ranges::find(members, instance, &Member::instance);
    if (found == members.end()) return std::nullopt;
    return static_cast<std::uint32_t>(found - members.begin());
  }

  std::uint64_t epoch = 0;  // 0: none
  std::vector<Member> members;
  bool one_host = false;  // all are on one host and can share memory
  Hosts hosts;
  Hosts alone;  // each rank is a host of its own, for an exchange without shared memory
};

using SharedMembers = std::shared_ptr<const EpochMembers>;

}  // namespace moolink::collective
