#pragma once

#include <cstdint>
#include <optional>
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
  std::uint32_t place(std::uint32_t rank) const;
  // The lane of this rank; none if it leads none.
  std::optional<std::uint32_t> lane(std::uint32_t rank) const;
  bool is_guest(std::uint32_t rank) const { return place(rank) == ranks[of[rank]].size(); }
  // Whether some host has several ranks and there are other hosts or guests.
  bool share_memory() const;
};

// By the host key of each rank; a rank without a key is alone. At least one rank is not a guest.
Hosts hosts_of(const std::vector<Uid>& keys, const std::vector<std::uint32_t>& guests = {});
// Whether all ranks have one host key.
bool share_a_host(const std::vector<Uid>& keys);

}  // namespace moolink::collective
