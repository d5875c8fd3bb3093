#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace moolink::wire {

// One live use of a path; given by the runtime, never used twice in a process.
using ConnectionId = std::uint64_t;

enum class PathKind : std::uint8_t { tcp = 0, shm = 1, verbs = 2 };
inline constexpr std::uint8_t kPathKinds = 3;

constexpr std::string_view path_name(PathKind kind) {
  switch (kind) {
    case PathKind::tcp:
      return "tcp";
    case PathKind::shm:
      return "shm";
    case PathKind::verbs:
      return "verbs";
  }
  return "unknown";
}

// A value that both ends of one connection have in common, and no other connection has, made from
// its secrets. Zeros where the path has none: a Unix socket, plain tcp.
using ChannelBinding = std::array<std::byte, 32>;

// What a proof is made for, besides the greetings: not good on any other connection.
struct Channel {
  PathKind path = PathKind::tcp;
  ChannelBinding binding{};
};

// What a session must know of a path to use it.
struct PathTraits {
  bool grants = false;  // parts go into grants; else as chunks in the stream
  std::size_t chunk_bytes = std::size_t{1} << 20;  // largest chunk that the path wants in one frame
  int preference = 0;                              // the live path with the highest number is used
  std::size_t grant_bytes = 0;                     // smaller parts go as chunks despite grants
  bool loans = false;                              // the peer can map this side's lending pool
  std::string_view cipher{};                       // of TLS; empty: others may read what is sent
  ChannelBinding binding{};
};

// Where a grant lies, in the words of the path that made it (GRANT frame).
struct GrantPlace {
  std::uint64_t grant = 0;    // unique in a connection
  std::uint64_t segment = 0;  // memfd segment on shm, remote key on verbs
  std::uint64_t offset = 0;   // in the segment, or the remote address
  std::uint64_t bytes = 0;

  template <class Fields>
  void fields(Fields& f) {
    f(grant, segment, offset, bytes);
  }
};

// Where a lent part lies in its lender's memory.
struct LoanPlace {
  std::uint64_t loan = 0;  // unique in a session and direction
  std::uint64_t segment = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

}  // namespace moolink::wire
