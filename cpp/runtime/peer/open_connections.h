#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/thread_safety.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::runtime {

// The open connections of one peer, and which of them have frames to send. RpcPeer owns this, and
// adds and removes connections as the transports and the Node say. Frames that are written to a
// connection one after another leave together at flush(). All calls are made with the engine's
// lock; a Connection* is valid until it is released.
class OpenConnections {
 public:
  using Shared = std::shared_ptr<transport::Connection>;

  void add(Shared connection) MOOLINK_LOCKED {
    const wire::ConnectionId id = connection->id();
    connections_.emplace(id, std::move(connection));
  }
  // Null: it has failed or was closed; the Node gets its end or has.
  const Shared* find_shared(wire::ConnectionId id) const MOOLINK_LOCKED {
    const auto found = connections_.find(id);
    return found == connections_.end() ? nullptr : &found->second;
  }
  transport::Connection* find(wire::ConnectionId id) const MOOLINK_LOCKED {
    const Shared* found = find_shared(id);
    return found == nullptr ? nullptr : found->get();
  }
  Shared remove(wire::ConnectionId id) MOOLINK_LOCKED {
    auto node = connections_.extract(id);
    return node.empty() ? nullptr : std::move(node.mapped());
  }
  void clear() MOOLINK_LOCKED {
    connections_.clear();
    unflushed_.clear();
  }
  const std::unordered_map<wire::ConnectionId, Shared>& all() const MOOLINK_LOCKED {
    return connections_;
  }

  void write(const Shared& connection, wire::Frame frame) MOOLINK_LOCKED {
    if (frame.header.type == wire::FrameType::chunk) with_chunks_.push_back(connection->id());
    connection->write(std::move(frame));
    if (unflushed_.empty() || unflushed_.back() != connection) unflushed_.push_back(connection);
  }
  void flush() MOOLINK_LOCKED {
    for (const Shared& connection : std::exchange(unflushed_, {})) connection->flush();
  }
  // Whether flush() would need system calls only, of sockets.
  bool unflushed_are_tcp() const MOOLINK_LOCKED {
    return std::ranges::all_of(unflushed_, [](const Shared& connection) {
      return connection->path() == wire::PathKind::tcp;
    });
  }
  // Calls again(id) for each connection that took chunks since the last call and still has room. A
  // session writes two chunks at a time and waits for room. The transport reports room when its
  // queue has run low; while the queue has never been full, this does.
  template <class Again>
  void report_room(Again again) MOOLINK_LOCKED {
    for (const wire::ConnectionId id : std::exchange(with_chunks_, {})) {
      const transport::Connection* connection = find(id);
      if (connection != nullptr && connection->writable()) again(id);
    }
  }

 private:
  std::unordered_map<wire::ConnectionId, Shared> connections_;
  std::vector<Shared> unflushed_;  // written to since the last flush()
  std::vector<wire::ConnectionId> with_chunks_;
};

}  // namespace moolink::runtime
