#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/uid.h"

namespace moolink::collective {

// The ranks that share a host. Hosts are numbered in the order of their lowest ranks. The members
// of a host share its work between hosts: one leads each lane. There are as many lanes as the host
// with the fewest ranks has of them.
//
// Guests are ranks that take no part, and are alone or with other guests on their hosts: each gets
// results from the leaders of one host, and counts as that host's.
struct Hosts {
  std::vector<std::uint32_t> of;                  // the host of each rank
  std::vector<std::vector<std::uint32_t>> ranks;  // of each host, rising; the first ones lead lanes
  std::vector<std::vector<std::uint32_t>> guests;  // of each host
  std::uint32_t lanes = 1;

  std::uint32_t count() const { return static_cast<std::uint32_t>(ranks.size()); }
  std::uint32_t leader(std::uint32_t host, std::uint32_t lane) const { return ranks[host][lane]; }
  // The place of this rank among those of its host; of a guest, their number.
  std::uint32_t place(std::uint32_t rank) const;
  // The lane of this rank; none if it leads none.
  std::optional<std::uint32_t> lane(std::uint32_t rank) const;
  bool is_guest(std::uint32_t rank) const { return place(rank) == ranks[of[rank]].size(); }
  // Some host has several ranks, and there are others, or guests.
  bool share_memory() const;
};

// By the host key of each rank; a rank without a key is alone. Some rank is no guest.
Hosts hosts_of(const std::vector<Uid>& keys, const std::vector<std::uint32_t>& guests = {});
// Whether all ranks have one host key.
bool share_a_host(const std::vector<Uid>& keys);

}  // namespace moolink::collective
