#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace moolink::transport::verbs {

// What a queue pair must know of the other one.
struct Endpoint {
  bool infiniband = false;
  std::uint16_t lid = 0;
  std::array<std::byte, 16> gid{};
  std::uint32_t queue_pair = 0;
  std::uint32_t first_packet = 0;
  std::uint8_t mtu = 0;  // ibv_mtu
  std::uint32_t credits = 0;

  template <class Fields>
  void fields(Fields& f) {
    f(infiniband, lid, gid, queue_pair, first_packet, mtu, credits);
  }
};

}  // namespace moolink::transport::verbs
