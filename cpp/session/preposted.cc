#include "session/preposted.h"

#include <algorithm>
#include <bit>

#include "session/outbox.h"

namespace moolink::session {

namespace {

// Per connection: what its sender can make this side hold without a message.
constexpr std::size_t kMaxPosted = 8;
constexpr std::size_t kMaxPostedBytes = std::size_t{256} << 20;
// How many buffers of an honest peer this side keeps.
constexpr std::size_t kMaxPeerBuffers = 64;

}  // namespace

void PrepostedBuffers::offer(ConnectionId connection, const wire::PathTraits& traits,
                             std::uint64_t bytes) {
  if (bytes < kInlineBytes || !traits.standing_grants) return;
  const std::uint64_t size = std::bit_ceil(bytes);
  std::size_t posted = 0;
  std::size_t posted_bytes = 0;
  for (auto at = buffers_.lower_bound({connection, 0});
       at != buffers_.end() && at->first.first == connection; ++at) {
    ++posted;
    posted_bytes += at->second.size();
  }
  if (posted >= kMaxPosted || size > kMaxPostedBytes - posted_bytes) return;
  sink_.add(AllocateGrant{connection, 0, 0, size});
}

void PrepostedBuffers::offer_again(ConnectionId connection, const wire::PathTraits& traits) {
  for (const std::uint64_t bytes : std::exchange(used_, {})) offer(connection, traits, bytes);
}

void PrepostedBuffers::post(ConnectionId connection, const wire::GrantPlace& place,
                            MutableBuffer memory) {
  if (memory.empty()) return;
  buffers_.emplace(std::pair(connection, place.grant), std::move(memory));
  sink_.write(connection, wire::FrameType::grant,
              wire::Grant{place.grant, 0, 0, place.bytes, place.segment, place.offset});
}

MutableBuffer PrepostedBuffers::take(ConnectionId connection, std::uint64_t grant,
                                     std::uint64_t bytes) {
  auto node = buffers_.extract({connection, grant});
  if (node.empty()) wire::fail("a part was placed in a buffer that was not posted");
  const MutableBuffer& memory = node.mapped();
  if (bytes > memory.size() || bytes < memory.size() / kMaxSlack) {
    wire::fail("a part that does not fit the buffer that it was placed in");
  }
  used_.push_back(bytes);
  return memory.slice(0, static_cast<std::size_t>(bytes));
}

void PrepostedBuffers::disconnected(ConnectionId connection) {
  std::erase_if(buffers_,
                [connection](const auto& entry) { return entry.first.first == connection; });
}

void PrepostedBuffers::clear() {
  buffers_.clear();
  used_.clear();
}

void PeerBuffers::add(Time now, ConnectionId connection, const wire::Grant& grant) {
  std::vector<Entry>& buffers = buffers_[connection];
  if (grant.grant == 0 || buffers.size() >= kMaxPeerBuffers) {
    wire::fail("a pre-posted buffer without memory, or too many of them");
  }
  buffers.push_back({{grant.grant, grant.segment, grant.offset, grant.bytes}, now});
}

std::optional<PeerBuffer> PeerBuffers::take(ConnectionId connection, std::uint64_t bytes) {
  const auto found = buffers_.find(connection);
  if (found == buffers_.end() || bytes == 0) return std::nullopt;
  std::vector<Entry>& buffers = found->second;
  auto best = buffers.end();
  for (auto at = buffers.begin(); at != buffers.end(); ++at) {
    if (at->place.bytes < bytes || at->place.bytes / kMaxSlack > bytes) continue;
    if (best == buffers.end() || at->place.bytes <= best->place.bytes) best = at;
  }
  if (best == buffers.end()) return std::nullopt;
  const PeerBuffer taken{connection, best->place};
  buffers.erase(best);
  return taken;
}

std::vector<PeerBuffer> PeerBuffers::take_idle(Time now) {
  std::vector<PeerBuffer> idle;
  for (auto& [id, buffers] : buffers_) {
    const ConnectionId connection = id;  // a lambda cannot refer to `id` in clang 14
    std::erase_if(buffers, [&](const Entry& entry) {
      if (now - entry.since < timing_.preposted_for) return false;
      idle.push_back({connection, entry.place});
      return true;
    });
  }
  return idle;
}

Time PeerBuffers::next_deadline() const {
  Time deadline = kNever;
  for (const auto& [connection, buffers] : buffers_) {
    if (buffers.empty()) continue;
    deadline = std::min(deadline, buffers.front().since + timing_.preposted_for);
  }
  return deadline;
}

}  // namespace moolink::session
