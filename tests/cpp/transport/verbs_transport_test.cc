// The transport over a real device, soft-RoCE among them: tests/verbs brings these where there is
// one. Faults are put in place of functions of the library.

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>

#include "check.h"
#include "conformance.h"
#include "transport/verbs/choice.h"
#include "transport/verbs/transport.h"

namespace moolink::transport::verbs {
namespace {

using conformance::chunk_frame;
using conformance::message_frame;
using conformance::pattern;
using conformance::same_bytes;
using conformance::Side;
using conformance::wait_until;

const Library& real() { return *load_library().functions; }

const Port& port() {
  static const Port chosen = choose(real(), Wishes::from_environment()).port.value();
  return chosen;
}

conformance::Subject subject_with(const Library& library) {
  return {"verbs",
          [&library](Environment& environment) {
            return std::make_unique<VerbsTransport>(environment, library, port());
          },
          "verbs://127.0.0.1:0", "verbs://127.0.0.1:99999"};
}

// A test that needs a device; without one there is no such test.
struct OnDevice {
  OnDevice(const std::string& name, std::function<void()> body) {
    if (availability().usable) check::add_test("verbs: " + name, std::move(body));
  }
};

const bool conformance_added = [] {
  if (availability().usable) conformance::add_tests(subject_with(real()));
  return availability().usable;
}();

struct Pair {
  explicit Pair(const Library& of_a = real(), const Library& of_b = real())
      : a(subject_with(of_a)), b(subject_with(of_b)) {
    connected = conformance::connect(subject_with(of_a), a, b);
  }
  // Writes the bytes of a part into a grant of b; its memory.
  MutableBuffer write(std::size_t size, std::uint64_t seed) {
    auto grant = b.connection().allocate_grant(size);
    CHECK(grant.has_value());
    const std::size_t before = a.filled.size();
    a.connection().fill_grant(grant->place, pattern(size, seed));
    CHECK_EQ(a.filled.size(), before);  // never from inside fill_grant()
    wait_until(a, b, [&] { return a.filled.size() == before + 1; });
    CHECK_EQ(a.filled.back().grant, grant->place.grant);
    // What tells of it comes after it.
    const std::size_t frames = b.frames.size();
    a.send(message_frame(1, 10));
    wait_until(a, b, [&] { return b.frames.size() == frames + 1; });
    return grant->memory;
  }

  Side a;
  Side b;
  bool connected = false;
};

const OnDevice written("parts are in their grant before what tells of them", [] {
  Pair pair;
  if (!pair.connected) return;
  CHECK(pair.a.connection().traits().grants);
  std::uint64_t seed = 0;
  for (const std::size_t size : {1, 20'000, 512 << 10, (512 << 10) + 1, 9 << 20}) {
    ++seed;
    CHECK(same_bytes(pair.write(size, seed), pattern(size, seed)));
  }
});

const OnDevice outside("a part larger than its grant is refused before anything is written", [] {
  Pair pair;
  if (!pair.connected) return;
  const auto grant = pair.b.connection().allocate_grant(1000);
  CHECK_THROWS(pair.a.connection().fill_grant(grant->place, pattern(1001, 1)), ErrorCode::wire);
});

const OnDevice wrong_key("a write outside of what was granted ends the connection on both sides",
                         [] {
                           Pair pair;
                           if (!pair.connected) return;
                           auto place = pair.b.connection().allocate_grant(1000)->place;
                           place.segment ^= 0x5a5a00;
                           pair.a.connection().fill_grant(place, pattern(1000, 1));
                           wait_until(pair.a, pair.b, [&] {
                             return pair.a.closures.size() == 1 && pair.b.closures.size() == 1;
                           });
                           CHECK(pair.a.closures[0].message.find("the device says") !=
                                 std::string::npos);
                         });

const OnDevice after_close("memory of a connection that has ended is not written to any more", [] {
  Pair pair;
  if (!pair.connected) return;
  const auto grant = pair.b.connection().allocate_grant(100'000);
  std::memset(grant->memory.data(), 7, grant->memory.size());
  pair.b.connection().close();
  pair.a.connection().fill_grant(grant->place, pattern(100'000, 1));
  wait_until(pair.a, pair.b, [&] { return pair.a.closures.size() == 1; });
  for (const std::byte byte : grant->memory.span()) CHECK(byte == std::byte{7});
});

const OnDevice many("small frames go on beside a large write, both ways", [] {
  Pair pair;
  if (!pair.connected) return;
  auto grant = pair.b.connection().allocate_grant(8 << 20);
  const Buffer bytes = pattern(8 << 20, 3);
  pair.a.connection().fill_grant(grant->place, bytes);
  for (std::uint64_t i = 1; i <= 300; ++i) {
    pair.a.send(message_frame(i, 500));
    pair.b.send(message_frame(i, 500));
  }
  wait_until(pair.a, pair.b, [&] {
    return pair.a.frames.size() == 300 && pair.b.frames.size() == 300 && pair.a.filled.size() == 1;
  });
  pair.a.send(message_frame(301, 500));
  wait_until(pair.a, pair.b, [&] { return pair.b.frames.size() == 301; });
  CHECK(same_bytes(grant->memory, bytes));
});

// --- faults

std::size_t most_registered = 0;  // what is larger is refused
int registration_error = ENOMEM;
ibv_mr* register_little(ibv_pd* domain, void* address, std::size_t bytes, int access) {
  if (bytes <= most_registered) return real().reg_mr(domain, address, bytes, access);
  errno = registration_error;
  return nullptr;
}

const OnDevice no_source("what cannot be registered is copied through slots, in order", [] {
  Library limited = real();
  limited.reg_mr = register_little;
  most_registered = std::size_t{1} << 20;
  Pair pair(limited);
  if (!pair.connected) return;
  CHECK(same_bytes(pair.write(100'000, 1), pattern(100'000, 1)));
  most_registered = 0;
  CHECK(same_bytes(pair.write(3 << 20, 2), pattern(3 << 20, 2)));
});

const OnDevice no_grant("memory that cannot be registered is not granted", [] {
  Library limited = real();
  limited.reg_mr = register_little;
  most_registered = std::size_t{2} << 20;
  Pair pair(real(), limited);
  if (!pair.connected) return;
  CHECK(!pair.b.connection().allocate_grant(100'000).has_value());
  most_registered = std::size_t{64} << 20;
  CHECK(pair.b.connection().allocate_grant(100'000).has_value());
});

const OnDevice no_memory("a device for which no memory can be registered refuses, with the reason",
                         [] {
                           Library limited = real();
                           limited.reg_mr = register_little;
                           most_registered = 0;
                           Side a(subject_with(real()));
                           Side b(subject_with(limited));
                           const auto address = b.transport->listen("verbs://127.0.0.1:0").at(0);
                           a.transport->dial(address);
                           wait_until(a, b, [&] { return a.dial_failures.size() == 1; });
                           CHECK(a.dial_failures[0].message.find(
                                     "can be registered: Cannot allocate memory") !=
                                 std::string::npos);
                           CHECK(a.connections.empty() && b.connections.empty());
                         });

std::optional<ibv_event_type> injected;
int inject_event(ibv_context* context, ibv_async_event* event) {
  if (!injected) return real().get_async_event(context, event);
  *event = {};
  event->element.port_num = port().number;
  event->event_type = *injected;
  injected.reset();
  return 0;
}
void acknowledge(ibv_async_event* event) {
  // The library counts its own only.
  if (event->event_type != IBV_EVENT_DEVICE_FATAL && event->event_type != IBV_EVENT_PORT_ERR &&
      event->event_type != IBV_EVENT_PORT_ACTIVE) {
    real().ack_async_event(event);
  }
}

void test_failing_device(ibv_event_type event) {
  Library failing = real();
  failing.get_async_event = inject_event;
  failing.ack_async_event = acknowledge;
  Side b(subject_with(real()));
  Side a(subject_with(failing));
  if (!conformance::connect(subject_with(real()), a, b)) return;
  const std::string address = a.dialled[0];
  auto& transport = static_cast<VerbsTransport&>(*a.transport);
  injected = event;
  transport.look_at_events();
  CHECK(a.closures.empty());  // from the loop only
  wait_until(a, b, [&] { return a.closures.size() == 1 && b.closures.size() == 1; });
  CHECK(a.closures[0].message.find(real().event_type_str(event)) != std::string::npos);
  a.transport->dial(address);
  if (event == IBV_EVENT_PORT_ERR) {
    wait_until(a, b, [&] { return a.dial_failures.size() == 1; });
    injected = IBV_EVENT_PORT_ACTIVE;
    transport.look_at_events();
    a.transport->dial(address);
  }
  wait_until(a, b, [&] { return a.connections.size() == 2 && b.connections.size() == 2; });
  a.connections[1]->write(message_frame(1, 1000));
  a.connections[1]->flush();
  wait_until(a, b, [&] { return b.frames.size() == 1; });
}

const OnDevice fatal("after a fatal error of the device it is opened anew",
                     [] { test_failing_device(IBV_EVENT_DEVICE_FATAL); });
const OnDevice down("a port that is down ends its connections, and takes new ones when it is up",
                    [] { test_failing_device(IBV_EVENT_PORT_ERR); });

int refuse_pairs(ibv_qp*, ibv_qp_attr*, int) { return EINVAL; }

const OnDevice no_pair("a queue pair that cannot be made is told to both sides", [] {
  Library failing = real();
  failing.modify_qp = refuse_pairs;
  for (const bool at_dialler : {true, false}) {
    Side a(subject_with(at_dialler ? failing : real()));
    Side b(subject_with(at_dialler ? real() : failing));
    a.transport->dial(b.transport->listen("verbs://127.0.0.1:0").at(0));
    wait_until(a, b, [&] { return a.dial_failures.size() == 1; });
    CHECK(a.dial_failures[0].message.find("queue pair") != std::string::npos);
    CHECK(b.connections.empty());
  }
});

}  // namespace
}  // namespace moolink::transport::verbs
