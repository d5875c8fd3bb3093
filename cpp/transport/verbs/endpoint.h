#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

namespace moolink::transport::verbs {

// What the queue pairs of a connection must know of the other side's, pair by pair.
struct Endpoint {
  struct Pair {
    std::uint32_t number = 0;
    std::uint32_t first_packet = 0;

    auto fields() { return std::tie(number, first_packet); }
  };

  bool infiniband = false;
  std::uint16_t lid = 0;
  std::array<std::byte, 16> gid{};
  std::uint8_t mtu = 0;  // ibv_mtu
  std::uint32_t credits = 0;
  std::vector<Pair> pairs;

  auto fields() { return std::tie(infiniband, lid, gid, mtu, credits, pairs); }
};

}  // namespace moolink::transport::verbs
