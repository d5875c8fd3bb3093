#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "base/enum_names.h"

namespace moolink::wire {

// One live use of a path; assigned by the runtime, never used twice in a process.
using ConnectionId = std::uint64_t;

enum class PathKind : std::uint8_t { tcp = 0, shm = 1, verbs = 2 };
inline constexpr std::uint8_t kPathKinds = 3;

inline constexpr auto kPathNames = enum_names<PathKind::verbs>("tcp", "shm", "verbs");
inline constexpr auto kTechnologies =
    enum_names<PathKind::verbs>("TCP", "shared memory", "RDMA");  // for messages to users

inline constexpr std::array kBestFirst = {PathKind::shm, PathKind::verbs, PathKind::tcp};

// Whether a path of this kind may connect peers of one host, or of two hosts.
constexpr bool serves(PathKind kind, bool same_host) {
  return kind == PathKind::tcp || (kind == PathKind::shm) == same_host;
}

// The best path between two hosts: others are used until it is connected, and while it is lost.
inline constexpr PathKind kBestBetweenHosts = PathKind::verbs;
constexpr PathKind best_path(bool same_host) {
  return same_host ? PathKind::shm : kBestBetweenHosts;
}

// The reasons why kinds of path are not enabled here, as far as they were checked.
using Lacking = std::map<PathKind, std::string>;

// A value common to both ends of one connection and to no other connection, made from its secrets.
// Zeros where the path has none: a Unix socket, plain tcp.
using ChannelBinding = std::array<std::byte, 32>;

// A proof covers it besides the greetings: the proof is not valid on any other connection.
struct Channel {
  PathKind path = PathKind::tcp;
  ChannelBinding binding{};
};

// The properties of a path that a session needs.
struct PathTraits {
  bool grants = false;  // parts go into grants; else as chunks in the stream
  std::size_t chunk_bytes = std::size_t{1} << 20;  // largest chunk for one frame on the path
  int preference = 0;                              // the live path with the highest number is used
  std::size_t grant_bytes = 0;                     // smaller parts go as chunks despite grants
  bool standing_grants = false;  // the sender maps grants: it may write a part there at once
  bool loans = false;            // the peer can map this side's lending pool
  std::string_view cipher{};     // of TLS; empty: others may read the traffic
  ChannelBinding binding{};
};

// The place of a grant, in terms of the path that made it (GRANT frame).
struct GrantPlace {
  std::uint64_t grant = 0;    // unique in a connection
  std::uint64_t segment = 0;  // a segment's number, or a remote key
  std::uint64_t offset = 0;   // in the segment, or the remote address
  std::uint64_t bytes = 0;

  auto fields() { return std::tie(grant, segment, offset, bytes); }
};

// The place of a lent part in its lender's memory.
struct LoanPlace {
  std::uint64_t loan = 0;  // unique in a session and direction
  std::uint64_t segment = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

}  // namespace moolink::wire
