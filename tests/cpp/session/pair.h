#pragma once

// Two sessions joined by a perfect connection, for tests of single steps.

#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "session/session.h"

namespace moolink::session::testing {

inline wire::ReceivedFrame as_received(const wire::Frame& frame) {
  std::vector<std::byte> bytes(frame.control.span().begin(), frame.control.span().end());
  for (const Buffer& piece : frame.payload) {
    bytes.insert(bytes.end(), piece.span().begin(), piece.span().end());
  }
  auto owner = std::make_shared<std::vector<std::byte>>(std::move(bytes));
  return {frame.header, Buffer(owner, owner->data(), owner->size())};
}

inline Buffer bytes_of(std::size_t size) {
  const MutableBuffer buffer = HeapAllocator().allocate(size);
  for (std::size_t i = 0; i < size; ++i) buffer.data()[i] = static_cast<std::byte>(i * 7);
  return buffer;
}

// One side: its session, and what it has asked for so far.
struct Side {
  Side(Uid self, Uid peer, Allocator& allocator, const Limits& limits)
      : session(
            [&] {
              Config config;
              config.self = self;
              config.peer = peer;
              config.limits = limits;
              return config;
            }(),
            allocator) {
    hello.instance = self;
    hello.name = "peer";
    hello.max_frame = limits.max_frame;
  }

  // Sorts the actions; frames wait in `out`.
  void collect() {
    std::vector<Action> actions;
    session.drain(actions);
    for (Action& action : actions) {
      if (auto* write = std::get_if<Write>(&action)) {
        out.push_back(std::move(write->frame));
      } else if (auto* delivered_message = std::get_if<Deliver>(&action)) {
        delivered.push_back(std::move(*delivered_message));
      } else if (auto* acknowledged = std::get_if<Acked>(&action)) {
        acked.push_back(acknowledged->cookie);
      } else if (auto* lost_session = std::get_if<Lost>(&action)) {
        lost.push_back(std::move(*lost_session));
      } else if (std::get_if<WindowOpened>(&action) != nullptr) {
        ++opened;
      }
    }
  }

  Session session;
  wire::Hello hello;
  std::deque<wire::Frame> out;
  std::vector<Deliver> delivered;
  std::vector<std::uint64_t> acked;
  std::vector<Lost> lost;
  int opened = 0;
};

struct Pair {
  explicit Pair(const Limits& limits = {})
      : a({1, 1}, {2, 2}, allocator, limits), b({2, 2}, {1, 1}, allocator, limits) {}

  // `a` accepts connection 1, `b` has dialled it.
  void connect(const wire::PathTraits& traits = {}) {
    a.session.attach(now, 1, wire::PathKind::tcp, traits, false, a.hello);
    b.session.attach(now, 1, wire::PathKind::tcp, traits, true, b.hello);
    exchange();
  }
  // Carries frames to and fro until nothing is left; returns how many.
  int exchange() {
    int frames = 0;
    for (bool moved = true; moved;) {
      moved = carry(a, b, frames);
      moved = carry(b, a, frames) || moved;
    }
    return frames;
  }
  bool send(Side& side, std::size_t bytes, std::uint64_t cookie, std::uint16_t lane = 0) {
    OutgoingMessage message;
    message.kind = 1;
    message.lane = lane;
    message.payload.body = bytes_of(bytes);
    message.cookie = cookie;
    return side.session.send(now, std::move(message));
  }

  Time now{seconds(100)};
  HeapAllocator allocator;
  Side a;
  Side b;

 private:
  bool carry(Side& from, Side& to, int& frames) {
    from.collect();
    const bool moved = !from.out.empty();
    for (; !from.out.empty(); from.out.pop_front()) {
      ++frames;
      const wire::Frame& frame = from.out.front();
      if (frame.header.type == wire::FrameType::chunk) {
        const auto head = wire::decode<wire::ChunkHead>(frame.control.span());
        const std::span<std::byte> target = to.session.chunk_target(1, head);
        if (!target.empty()) {
          std::memcpy(target.data(), frame.payload.front().data(), target.size());
        }
        to.session.chunk_received(now, 1, head);
        from.session.writable(now, 1);
        from.collect();
      } else {
        to.session.received(now, 1, as_received(frame));
      }
    }
    to.collect();
    return moved;
  }
};

}  // namespace moolink::session::testing
