// The transport between two processes, of one machine or two, over a real device: both run these
// tests at the same time, one with MOOLINK_TEST_APART="listen ADDRESS" in its environment and one
// with "dial ADDRESS". tests/nightly/verbs brings them.

#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "conformance.h"
#include "transport/verbs/availability.h"
#include "transport/verbs/choice.h"
#include "transport/verbs/transport.h"

namespace moolink::transport::verbs {
namespace verbs_apart_test {

using conformance::check_messages;
using conformance::message_frame;
using conformance::pattern;
using conformance::same_bytes;
using conformance::Side;
using conformance::wait_until;

constexpr int kFirstPort = 4440;  // each test has the next one
constexpr std::uint64_t kLast = std::numeric_limits<std::uint32_t>::max();

struct Role {
  bool listens;
  std::string address;
};

std::optional<Role> role() {
  const char* given = std::getenv("MOOLINK_TEST_APART");
  const std::string text = given == nullptr ? "" : given;
  const std::size_t space = text.find(' ');
  if (space == std::string::npos) return {};
  return Role{text.substr(0, space) == "listen", text.substr(space + 1)};
}

conformance::Subject subject() {
  return {"verbs",
          [](Environment& environment) {
            const Library& library = *load_library().functions;
            static const Port port = choose(library, Preferences::from_environment()).port.value();
            return std::make_unique<VerbsTransport>(environment, library, port);
          },
          "", ""};
}

// This process' side.
class Half {
 public:
  explicit Half(Limits limits = {}) : side(subject(), limits) {}

  // Connects with the other one, which may begin later.
  bool meet(int test) {
    const std::string place = "verbs://" + role_.address + ":" + std::to_string(kFirstPort + test);
    if (role_.listens) side.transport->listen(place);
    std::size_t dials = 0;
    return wait_until(side, [&] {
      if (!role_.listens && side.connections.empty() && side.dial_failures.size() == dials) {
        ++dials;
        side.transport->dial(place);
      }
      return side.connections.size() == 1;
    });
  }
  // Waits until both have all that was sent; this one has so many frames then.
  void finish(std::size_t frames) {
    if (!role_.listens) side.send(message_frame(kLast, 0));
    wait_until(side, [&] { return side.frames.size() == frames + 1; });
    if (role_.listens) {
      side.send(message_frame(kLast, 0));
      wait_until(side, [&] { return side.closures.size() == 1; });
    }
    if (side.frames.empty()) return;
    CHECK_EQ(side.frames.back().header.seq, kLast);
    side.frames.pop_back();
  }
  bool listens() const { return role_.listens; }

  Side side;

 private:
  const Role role_ = role().value();
};

void test_frames(int test) {
  Half half;
  if (!half.meet(test)) return;
  const std::vector<std::size_t> sizes = {
      0, 1, 31, 4096, 32740, 32768, 70'000, 131'072, 1 << 20, 5, 3 << 20, (16 << 20) - 200};
  for (std::size_t i = 0; i < sizes.size(); ++i) half.side.send(message_frame(i + 1, sizes[i]));
  half.finish(sizes.size());
  check_messages(half.side, sizes);
  CHECK_EQ(half.side.connection().queued_bytes(), 0u);
}

void test_random_sizes(int test) {
  Half half;
  if (!half.meet(test)) return;
  Random random(1);
  std::vector<std::size_t> sizes;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    sizes.push_back(random.chance(1, 20) ? random.below(300'000) : random.below(400));
    const std::lock_guard lock(half.side.engine);
    half.side.connection().write(message_frame(i + 1, sizes.back()));
    if (random.chance(1, 3)) half.side.connection().flush();
  }
  half.finish(sizes.size());
  check_messages(half.side, sizes);
}

void test_chunks(int test) {
  constexpr std::size_t kPart = (std::size_t{5} << 20) + 77;
  constexpr std::size_t kChunk = std::size_t{300} << 10;
  Half half;
  half.side.parts[1] = half.side.allocator.allocate(kPart);
  if (!half.meet(test)) return;
  std::vector<std::size_t> sizes;
  for (std::size_t offset = 0; offset < kPart; offset += kChunk) {
    const Buffer bytes = pattern(kPart, 1).slice(offset, std::min(kChunk, kPart - offset));
    half.side.send(conformance::chunk_frame(1, offset, bytes));
    sizes.push_back(100);
    half.side.send(message_frame(sizes.size(), 100));
  }
  half.finish(sizes.size());
  check_messages(half.side, sizes);
  CHECK_EQ(half.side.chunks.size(), sizes.size());
  CHECK(same_bytes(half.side.parts[1], pattern(kPart, 1)));
}

void test_grants(int test) {
  Half half;
  if (!half.meet(test)) return;
  Side& side = half.side;
  std::size_t frames = 0;
  for (const std::size_t size : {1, 20'000, 512 << 10, (512 << 10) + 1, 9 << 20}) {
    const auto grant = side.connection().allocate_grant(size);
    CHECK(grant.has_value());
    side.send(wire::make_frame(wire::FrameType::grant, grant->place));
    if (!wait_until(side, [&] { return side.frames.size() > frames; })) return;
    const auto place = wire::decode_control<wire::GrantPlace>(side.frames[frames]);
    const std::size_t filled = side.filled.size();
    side.connection().fill_grant(place, pattern(size, size));
    wait_until(side, [&] { return side.filled.size() == filled + 1; });
    side.send(message_frame(1, 10));  // tells of it, and comes after it
    frames += 2;
    if (!wait_until(side, [&] { return side.frames.size() >= frames; })) return;
    CHECK(same_bytes(grant->memory, pattern(size, size)));
  }
  half.finish(frames);
}

void test_frame_limit(int test) {
  Limits limits;
  limits.max_frame = 1 << 20;
  Half half(limits);
  if (!half.meet(test)) return;
  if (!half.listens()) {
    half.side.send(message_frame(1, 900'000));
    half.side.send(message_frame(2, 1 << 20));
  }
  wait_until(half.side, [&] { return half.side.closures.size() == 1; });
  if (!half.listens()) return;
  CHECK(half.side.closures[0].code == ErrorCode::wire);
  check_messages(half.side, {900'000});
}

void test_back_pressure(int test) {
  Half half;
  if (!half.meet(test)) return;
  Side& side = half.side;
  std::vector<std::size_t> sizes;
  while (sizes.size() < 64 && side.connection().writable()) {
    sizes.push_back(1 << 20);
    const std::lock_guard lock(side.engine);
    side.connection().write(message_frame(sizes.size(), sizes.back()));
  }
  CHECK(!side.connection().writable());
  wait_until(side, [&] { return side.writable_calls > 0; });
  CHECK(side.connection().writable());
  half.finish(sizes.size());
  check_messages(side, sizes);
}

void test_nobody_listens(int) {
  const Role here = role().value();
  if (here.listens) return;
  Side side(subject());
  side.transport->dial("verbs://" + here.address + ":" + std::to_string(kFirstPort - 1));
  wait_until(side, [&] { return side.dial_failures.size() == 1; });
  CHECK(!side.dial_failures.empty() && side.dial_failures[0].code == ErrorCode::peer_lost);
}

const bool added = [] {
  if (!role() || !availability().usable) return false;
  const std::pair<const char*, void (*)(int)> tests[] = {
      {"frames of every size arrive both ways, in order", test_frames},
      {"frames of random sizes, written in batches", test_random_sizes},
      {"chunks go straight into their memory, between small frames", test_chunks},
      {"parts are in their grant before what tells of them", test_grants},
      {"a frame over the limit closes the connection", test_frame_limit},
      {"a full queue is not writable, a drained one is again", test_back_pressure},
      {"dialling where nobody listens fails as refused", test_nobody_listens},
  };
  int number = 0;
  for (const auto& [name, body] : tests) {
    check::add_test(std::string("verbs apart: ") + name, [run = body, number] { run(number); });
    ++number;
  }
  return true;
}();

}  // namespace verbs_apart_test
}  // namespace moolink::transport::verbs
