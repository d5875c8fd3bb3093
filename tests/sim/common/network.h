#pragma once

// Connections of a simulated network: streams of frames with latency, bandwidth, stalls and cuts,
// and grants that a copier of the sender fills bit by bit.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/limits.h"
#include "common/program.h"
#include "common/simulation.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::sim {

using wire::ConnectionId;

// What a transport tells its user.
class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual void received(ConnectionId connection, const wire::ReceivedFrame& frame) = 0;
  virtual std::span<std::byte> chunk_target(ConnectionId connection,
                                            const wire::ChunkHead& head) = 0;
  virtual void chunk_received(ConnectionId connection, const wire::ChunkHead& head) = 0;
  virtual void closed(ConnectionId connection, const Error& error) = 0;
  virtual void writable(ConnectionId connection) = 0;
  virtual void grant_filled(ConnectionId connection, std::uint64_t grant) = 0;

  // A stopped process: nothing reaches it before.
  Time paused_until{};
};

struct Path {
  wire::PathKind kind = wire::PathKind::tcp;
  wire::PathTraits traits;
  Duration latency = microseconds(100);
  double bytes_per_us = 1000;
  bool streams = false;  // the bytes of some chunks come after later frames and chunks
};

class Network {
 public:
  explicit Network(Simulation& simulation) : simulation_(&simulation) {}

  bool chunks_get_stuck = true;

  // Connects two endpoints; the ends have different ids.
  std::pair<ConnectionId, ConnectionId> connect(Endpoint& a, Endpoint& b, const Path& path) {
    auto connection = std::make_shared<Connection>();
    connection->path = path;
    for (int side = 0; side < 2; ++side) {
      connection->ends[side].owner = side == 0 ? &a : &b;
      connection->ends[side].id = ++last_id_;
      ends_[last_id_] = {connection, side};
    }
    all_.push_back(connection);
    return {connection->ends[0].id, connection->ends[1].id};
  }

  void write(ConnectionId id, wire::Frame frame) {
    const auto [connection, side] = ends_.at(id);
    End& end = connection->ends[side];
    if (!end.open) return;
    const Path& path = connection->path;
    const auto transfer = Duration(static_cast<Duration::rep>(
        1000.0 * static_cast<double>(frame.bytes()) / path.bytes_per_us));
    end.departure = std::max(end.departure, simulation_->now()) + transfer;
    if (frame.header.type == wire::FrameType::chunk) {
      simulation_->at(end.departure, [this, connection = connection, side = side, id] {
        tell_when_awake(connection, side, [id](Endpoint& owner) { owner.writable(id); });
      });
    }
    // Under way are copies: a sender's memory is not held by what the network has lost.
    for (Buffer& piece : frame.payload) piece = copy_of(piece);
    const Duration jitter = simulation_->between(Duration(0), path.latency);
    push(connection, 1 - side, end.departure + path.latency + jitter, std::move(frame));
  }

  // The user closes its end; what it has written still arrives.
  void close(ConnectionId id) {
    const auto [connection, side] = ends_.at(id);
    End& end = connection->ends[side];
    if (!end.open) return;
    end.open = false;
    end.incoming.clear();
    push(connection, 1 - side,
         std::max(end.departure, simulation_->now()) + connection->path.latency, {}, /*last=*/true);
  }

  // The connection breaks: what is under way is gone, each end learns of it in its own time.
  void cut(ConnectionId id) {
    const auto connection = ends_.at(id).first;
    if (connection->broken) return;
    connection->broken = true;
    for (int side = 0; side < 2; ++side) {
      End& end = connection->ends[side];
      // What has arrived up to here may still be read; the rest is lost.
      std::erase_if(end.incoming,
                    [&](const InFlight& item) { return item.arrival > simulation_->now(); });
      if (end.incoming.size() > kReadAfterCut) {
        end.incoming.erase(end.incoming.begin() + kReadAfterCut, end.incoming.end());
      }
      if (end.chunk_step > 0 && !end.incoming.empty() && simulation_->random.chance(1, 2)) {
        end.incoming.pop_front();  // in the middle of a chunk
        end.chunk_step = 0;
        end.incoming.clear();
      }
      push(connection, side,
           simulation_->now() + simulation_->between(Duration(0), milliseconds(300)), {},
           /*last=*/true);
    }
  }

  // Nothing gets through for a while; nothing is lost.
  void stall(ConnectionId id, Duration duration) {
    const auto connection = ends_.at(id).first;
    connection->stalled_until = std::max(connection->stalled_until, simulation_->now() + duration);
  }

  void cut_between(const Endpoint& a, const Endpoint& b) {
    for (const ConnectionId victim : between(a, b)) cut(victim);
  }
  void stall_between(const Endpoint& a, const Endpoint& b, Duration duration) {
    for (const ConnectionId victim : between(a, b)) stall(victim, duration);
  }

  void cut_all_of(const Endpoint& endpoint) {
    std::vector<ConnectionId> victims;
    for (const auto& connection : all_) {
      const bool ours =
          connection->ends[0].owner == &endpoint || connection->ends[1].owner == &endpoint;
      if (ours && !connection->broken) victims.push_back(connection->ends[0].id);
    }
    for (const ConnectionId victim : victims) cut(victim);
  }

  void stall_all_of(const Endpoint& endpoint, Duration duration) {
    for (const auto& connection : all_) {
      if (connection->ends[0].owner == &endpoint || connection->ends[1].owner == &endpoint) {
        connection->stalled_until =
            std::max(connection->stalled_until, simulation_->now() + duration);
      }
    }
  }

  // The process behind the endpoint has died. Its kernel closes the connections, or (host gone)
  // nothing is ever heard of them again.
  void crash(Endpoint& endpoint, bool host_gone) {
    for (auto& [id, place] : ends_) {
      End& end = place.first->ends[place.second];
      if (end.owner != &endpoint || !end.open) continue;
      if (!host_gone) {
        close(id);
      } else {
        end.open = false;
        place.first->stalled_until = kNever;
      }
    }
  }

  bool is_open(ConnectionId id) const {
    const auto& [connection, side] = ends_.at(id);
    return connection->ends[side].open && !connection->broken;
  }
  // The first ends of all connections that work.
  std::vector<ConnectionId> working() const {
    std::vector<ConnectionId> ids;
    for (const auto& connection : all_) {
      if (!connection->broken && connection->ends[0].open && connection->ends[1].open) {
        ids.push_back(connection->ends[0].id);
      }
    }
    return ids;
  }

  // Memory of this end that the other one may fill. Kept until the end of the simulation, as a
  // segment that the other process has mapped would be.
  std::pair<wire::GrantPlace, MutableBuffer> allocate_grant(ConnectionId id, std::uint64_t bytes) {
    const auto connection = ends_.at(id).first;
    const MutableBuffer memory = HeapAllocator().allocate(static_cast<std::size_t>(bytes));
    const std::uint64_t grant = ++last_grant_;
    connection->grants[grant] = memory;
    return {{grant, 0, 0, bytes}, memory};
  }

  // The same memory, as the other end has it mapped.
  MutableBuffer grant_memory(ConnectionId id, const wire::GrantPlace& place) const {
    const auto& grants = ends_.at(id).first->grants;
    const auto memory = grants.find(place.grant);
    require(memory != grants.end(), "a grant stands that was never given");
    return memory->second;
  }

  // The copier: two steps, as long as this end is open (closing it joins the copier).
  void fill_grant(ConnectionId id, const wire::GrantPlace& place, const Buffer& bytes) {
    const auto [connection, side] = ends_.at(id);
    const auto memory = connection->grants.find(place.grant);
    require(memory != connection->grants.end(), "a grant was filled that was never given");
    const MutableBuffer target = memory->second;
    const std::size_t half = bytes.size() / 2;
    const auto step = [this, connection = connection, side = side, target, bytes](
                          std::size_t from, std::size_t size) {
      if (!connection->ends[side].open) return;
      std::memcpy(target.data() + from, bytes.data() + from, size);
    };
    const Duration first = simulation_->between(Duration(0), milliseconds(2));
    const Duration second = first + simulation_->between(Duration(0), milliseconds(30));
    simulation_->after(first, [step, half] { step(0, half); });
    simulation_->after(
        second, [this, step, half, bytes, connection = connection, side = side, id, place] {
          step(half, bytes.size() - half);
          tell_when_awake(connection, side,
                          [id, place](Endpoint& owner) { owner.grant_filled(id, place.grant); });
        });
  }

 private:
  static constexpr std::ptrdiff_t kReadAfterCut = 16;  // frames in the receiver's socket at most

  struct InFlight {
    Time arrival;
    wire::Frame frame;
    bool last = false;  // the end of the stream
  };
  struct End {
    Endpoint* owner = nullptr;
    ConnectionId id = 0;
    bool open = true;
    Time departure{};  // of what was written last
    std::deque<InFlight> incoming;
    bool pumping = false;
    std::span<std::byte> target;  // of the chunk that is arriving
    int chunk_step = 0;
  };
  struct Apart {
    wire::ChunkHead head;
    Buffer bytes;
    std::span<std::byte> target;
    std::size_t done = 0;
  };
  struct Connection {
    Path path;
    End ends[2];
    bool broken = false;
    Time stalled_until{};
    std::map<std::uint64_t, MutableBuffer> grants;
  };
  using ConnectionPtr = std::shared_ptr<Connection>;

  std::vector<ConnectionId> between(const Endpoint& a, const Endpoint& b) const {
    std::vector<ConnectionId> ids;
    for (const auto& connection : all_) {
      const Endpoint* first = connection->ends[0].owner;
      const Endpoint* second = connection->ends[1].owner;
      const bool theirs = (first == &a && second == &b) || (first == &b && second == &a);
      if (theirs && !connection->broken) ids.push_back(connection->ends[0].id);
    }
    return ids;
  }

  void push(const ConnectionPtr& connection, int side, Time arrival, wire::Frame frame,
            bool last = false) {
    End& end = connection->ends[side];
    if (!end.open || (connection->broken && !last)) return;
    if (!end.incoming.empty()) arrival = std::max(arrival, end.incoming.back().arrival);
    end.incoming.push_back({arrival, std::move(frame), last});
    pump_later(connection, side, arrival);
  }

  void pump_later(const ConnectionPtr& connection, int side, Time time) {
    End& end = connection->ends[side];
    if (end.pumping || end.incoming.empty() || time == kNever) return;
    end.pumping = true;
    simulation_->at(std::max(time, end.incoming.front().arrival), [this, connection, side] {
      connection->ends[side].pumping = false;
      pump(connection, side);
    });
  }

  // Hands on what has arrived, one step at a time.
  void pump(const ConnectionPtr& connection, int side) {
    End& end = connection->ends[side];
    if (!end.open || end.incoming.empty()) return;
    const Time ready =
        std::max(connection->broken ? Time{} : connection->stalled_until, end.owner->paused_until);
    if (ready > simulation_->now()) {
      pump_later(connection, side, ready);
      return;
    }
    InFlight& item = end.incoming.front();
    if (item.last) {
      end.incoming.clear();
      end.open = false;
      end.owner->closed(end.id, make_error(ErrorCode::peer_lost, "connection lost"));
      return;
    }
    if (item.frame.header.type == wire::FrameType::chunk) {
      const bool whole = end.chunk_step == 0;
      if (whole && connection->path.streams && simulation_->random.chance(3, 4)) {
        return begin_apart(connection, side);
      }
      pump_chunk(connection, side);
      return;
    }
    const wire::ReceivedFrame frame = received(item.frame);
    end.incoming.pop_front();
    end.owner->received(end.id, frame);
    pump_later(connection, side, simulation_->now());
  }

  // The head of a chunk, then its bytes in two pieces, then its end.
  void pump_chunk(const ConnectionPtr& connection, int side) {
    End& end = connection->ends[side];
    const wire::Frame& frame = end.incoming.front().frame;
    const auto head = wire::decode<wire::ChunkHead>(frame.control.span());
    const Buffer& bytes = frame.payload.front();
    require(head.bytes == bytes.size(), "a chunk's head does not tell its size");
    const std::size_t half = bytes.size() / 2;
    switch (end.chunk_step++) {
      case 0:
        end.target = end.owner->chunk_target(end.id, head);
        require(end.target.empty() || end.target.size() == bytes.size(),
                "a chunk's target has another size");
        break;
      case 1:
        if (!end.target.empty()) std::memcpy(end.target.data(), bytes.data(), half);
        break;
      default:
        if (!end.target.empty()) {
          std::memcpy(end.target.data() + half, bytes.data() + half, bytes.size() - half);
        }
        end.chunk_step = 0;
        end.target = {};
        end.incoming.pop_front();
        end.owner->chunk_received(end.id, head);
    }
    // Now and then a chunk gets stuck in the middle, so that the other paths overtake it.
    const bool stuck = chunks_get_stuck && simulation_->random.chance(1, 50);
    const Duration longest = stuck ? milliseconds(400) : milliseconds(1);
    pump_later(connection, side, simulation_->now() + simulation_->between(Duration(0), longest));
  }

  // Delivers the head of a chunk; its bytes come later, over a stream.
  void begin_apart(const ConnectionPtr& connection, int side) {
    ++coverage["chunks over streams"];
    End& end = connection->ends[side];
    const wire::Frame frame = std::move(end.incoming.front().frame);
    end.incoming.pop_front();
    const auto head = wire::decode<wire::ChunkHead>(frame.control.span());
    const Buffer bytes = frame.payload.front();
    const std::span<std::byte> target = end.owner->chunk_target(end.id, head);
    require(target.empty() || target.size() == bytes.size(), "a chunk's target has another size");
    go_on_apart(connection, side, std::make_shared<Apart>(Apart{head, bytes, target}));
    pump_later(connection, side, simulation_->now());
  }

  void go_on_apart(const ConnectionPtr& connection, int side, const std::shared_ptr<Apart>& apart) {
    const Time stalled =
        std::max(connection->stalled_until, connection->ends[side].owner->paused_until);
    if (stalled == kNever) return;
    const bool stuck = chunks_get_stuck && simulation_->random.chance(1, 50);
    const Duration longest = stuck ? milliseconds(400) : milliseconds(2);
    const Time next = simulation_->now() + simulation_->between(Duration(0), longest);
    simulation_->at(std::max(next, stalled), [this, connection, side, apart] {
      End& end = connection->ends[side];
      if (!end.open || connection->broken) return;  // lost, perhaps in the middle
      if (std::max(connection->stalled_until, end.owner->paused_until) > simulation_->now()) {
        return go_on_apart(connection, side, apart);
      }
      const std::size_t left = apart->bytes.size() - apart->done;
      const std::size_t size = apart->done == 0 && left > 1 ? left / 2 : left;
      if (!apart->target.empty()) {
        std::memcpy(apart->target.data() + apart->done, apart->bytes.data() + apart->done, size);
      }
      apart->done += size;
      if (apart->done < apart->bytes.size()) return go_on_apart(connection, side, apart);
      end.owner->chunk_received(end.id, apart->head);
    });
  }

  template <class Tell>
  void tell_when_awake(const ConnectionPtr& connection, int side, Tell tell) {
    End& end = connection->ends[side];
    if (!end.open) return;
    if (end.owner->paused_until > simulation_->now()) {
      simulation_->at(end.owner->paused_until,
                      [this, connection, side, tell] { tell_when_awake(connection, side, tell); });
      return;
    }
    tell(*end.owner);
  }

  static Buffer copy_of(const Buffer& bytes) {
    const MutableBuffer copy = HeapAllocator().allocate(bytes.size());
    if (!bytes.empty()) std::memcpy(copy.data(), bytes.data(), bytes.size());
    return copy;
  }

  // What a transport makes of the bytes: the header passes through its real encoding.
  static wire::ReceivedFrame received(const wire::Frame& frame) {
    wire::ReceivedFrame result;
    result.header = wire::decode_header(wire::encode_header(frame.header), Limits{});
    const MutableBuffer bytes = HeapAllocator().allocate(frame.header.length);
    std::size_t at = 0;
    const auto append = [&](const Buffer& piece) {
      require(at + piece.size() <= bytes.size(), "a frame longer than its header says");
      if (!piece.empty()) std::memcpy(bytes.data() + at, piece.data(), piece.size());
      at += piece.size();
    };
    append(frame.control);
    for (const Buffer& piece : frame.payload) append(piece);
    require(at == bytes.size(), "a frame shorter than its header says");
    result.bytes = bytes;
    return result;
  }

  Simulation* simulation_;
  ConnectionId last_id_ = 0;
  std::uint64_t last_grant_ = 0;
  std::vector<ConnectionPtr> all_;
  std::map<ConnectionId, std::pair<ConnectionPtr, int>> ends_;
};

}  // namespace moolink::sim
