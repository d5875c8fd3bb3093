#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/uid.h"

namespace moolink::collective {

// The ranks that share a host. Hosts are numbered in the order of their lowest ranks. The members
// of a host share its work between hosts: one leads each lane. There are as many lanes as the host
// with the fewest ranks has of them.
struct Hosts {
  std::vector<std::uint32_t> of;                  // the host of each rank
  std::vector<std::vector<std::uint32_t>> ranks;  // of each host, rising; the first ones lead lanes
  std::uint32_t lanes = 1;

  std::uint32_t count() const { return static_cast<std::uint32_t>(ranks.size()); }
  std::uint32_t leader(std::uint32_t host, std::uint32_t lane) const { return ranks[host][lane]; }
  // The place of this rank among those of its host.
  std::uint32_t place(std::uint32_t rank) const;
  // The lane of this rank; none if it leads none.
  std::optional<std::uint32_t> lane(std::uint32_t rank) const;
  // There are several hosts, and some of them have several ranks.
  bool share_memory() const { return count() > 1 && count() < of.size(); }
};

// By the host key of each rank; a rank without a key is alone.
Hosts hosts_of(const std::vector<Uid>& keys);
// Whether all ranks have one host key.
bool share_a_host(const std::vector<Uid>& keys);

}  // namespace moolink::collective
