// The transport over a real device, soft-RoCE among them: tests/nightly/verbs brings these where
// there is one. Faults are put in place of functions of the library.

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "conformance.h"
#include "device/fake_cuda.h"
#include "fake_dmabuf.h"
#include "memory/pool.h"
#include "transport/verbs/choice.h"
#include "transport/verbs/transport.h"

namespace moolink::transport::verbs {
namespace verbs_transport_test {

using conformance::chunk_frame;
using conformance::message_frame;
using conformance::pattern;
using conformance::same_bytes;
using conformance::Side;
using conformance::wait_until;

void says(const std::string& text, const std::string& part) {
  CHECK(text.find(part) != std::string::npos);
}

const Library& real() { return *load_library().functions; }

const Port& port() {
  static const Port chosen = choose(real(), Preferences::from_environment()).port.value();
  return chosen;
}

conformance::Subject subject_with(const Library& library, std::size_t queue_pairs = 3,
                                  bool gpudirect = false) {
  return {"verbs",
          [&library, queue_pairs, gpudirect](Environment& environment) {
            Port with = port();
            with.queue_pairs = queue_pairs;
            with.gpudirect = gpudirect;
            return std::make_unique<VerbsTransport>(environment, library, with);
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
      : Pair(subject_with(of_a), subject_with(of_b)) {}
  Pair(const conformance::Subject& of_a, const conformance::Subject& of_b) : a(of_a), b(of_b) {
    connected = conformance::connect(of_a, a, b);
  }
  // Writes the bytes of a part into a grant of b; its memory.
  MutableBuffer write(std::size_t size, std::uint64_t seed) { return write(pattern(size, seed)); }
  MutableBuffer write(const Buffer& bytes) {
    auto grant = b.connection().allocate_grant(bytes.size());
    CHECK(grant.has_value());
    const std::size_t before = a.filled.size();
    a.connection().fill_grant(grant->place, bytes);
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

const OnDevice unequal("sides with other numbers of queue pairs use as many as both have", [] {
  const std::pair<std::size_t, std::size_t> counts[] = {{1, 1}, {1, 3}, {3, 2}, {2, 8}};
  for (const auto& [of_a, of_b] : counts) {
    Pair pair(subject_with(real(), of_a), subject_with(real(), of_b));
    if (!pair.connected) return;
    CHECK(same_bytes(pair.write(5 << 20, of_a), pattern(5 << 20, of_a)));
    CHECK(same_bytes(pair.write(1000, of_b), pattern(1000, of_b)));
  }
});

// Keeps back what one side posts on all of its queue pairs but the first.
struct KeptBack {
  struct Request {
    ibv_qp* pair;
    ibv_send_wr request;
    ibv_sge where;
  };
  static inline std::vector<ibv_qp*> pairs;  // in the order in which they were made
  static inline std::vector<Request> requests;
  static inline int arrived = 0;  // at the other side: SENDs with bytes

  static ibv_qp* create(ibv_pd* domain, ibv_qp_init_attr* attributes) {
    pairs.push_back(real().create_qp(domain, attributes));
    return pairs.back();
  }
  static int post(ibv_qp* pair, ibv_send_wr* request, ibv_send_wr** bad) {
    if (pair == pairs.front()) return real().post_send(pair, request, bad);
    requests.push_back({pair, *request, request->num_sge > 0 ? *request->sg_list : ibv_sge{}});
    return 0;
  }
  static void let_go(std::size_t index) {
    Request& kept = requests.at(index);
    kept.request.sg_list = &kept.where;
    ibv_send_wr* bad = nullptr;
    CHECK_EQ(real().post_send(kept.pair, &kept.request, &bad), 0);
  }
  static int poll(ibv_cq* queue, int most, ibv_wc* into) {
    const int count = real().poll_cq(queue, most, into);
    for (int i = 0; i < count; ++i) {
      arrived += (into[i].wr_id & QueuePair::kRequest) == 0 && into[i].byte_len > 0 ? 1 : 0;
    }
    return count;
  }
};

const OnDevice marked("what tells of a part waits for its pieces on every queue pair", [] {
  Library keeping = real();
  keeping.create_qp = KeptBack::create;
  keeping.post_send = KeptBack::post;
  Library counting = real();
  counting.poll_cq = KeptBack::poll;
  KeptBack::pairs.clear();
  KeptBack::requests.clear();
  Pair pair(keeping, counting);
  if (!pair.connected) return;
  const std::size_t size = std::size_t{2} << 20;
  const Buffer bytes = pattern(size, 7);
  auto grant = pair.b.connection().allocate_grant(size);
  pair.a.connection().fill_grant(grant->place, bytes);
  wait_until(pair.a, pair.b, [&] { return pair.a.filled.size() == 1; });
  // Four pieces over two queue pairs, and a mark on each of these.
  CHECK_EQ(KeptBack::requests.size(), std::size_t{6});
  KeptBack::arrived = 0;
  for (std::uint64_t i = 1; i <= 3; ++i) pair.a.send(message_frame(i, 10'000));
  wait_until(pair.a, pair.b, [&] { return KeptBack::arrived >= 3; });
  pair.b.turn();
  CHECK(pair.b.frames.empty());
  for (std::size_t i = 0; i < 5; ++i) KeptBack::let_go(i);
  pair.b.send(message_frame(9, 10));  // goes past what waits
  wait_until(pair.a, pair.b, [&] { return pair.a.frames.size() == 1; });
  CHECK(pair.b.frames.empty());
  KeptBack::let_go(5);
  wait_until(pair.a, pair.b, [&] { return pair.b.frames.size() == 3; });
  CHECK(same_bytes(grant->memory, bytes));
  for (std::uint64_t i = 0; i < 3; ++i) CHECK_EQ(pair.b.frames[i].header.seq, i + 1);
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

int sources_registered = 0;  // memory that the device may only read
ibv_mr* count_sources(ibv_pd* domain, void* address, std::size_t bytes, int access) {
  sources_registered += access == 0 ? 1 : 0;
  return real().reg_mr(domain, address, bytes, access);
}

const OnDevice registered("memory that messages have in turn is registered once for all peers", [] {
  Library counting = real();
  counting.reg_mr = count_sources;
  Side a(subject_with(counting));
  Side b(subject_with(real()));
  if (!conformance::connect(subject_with(real()), a, b)) return;
  a.transport->dial(a.dialled[0]);
  wait_until(a, b, [&] { return a.connections.size() == 2 && b.connections.size() == 2; });
  memory::Pool pool;
  sources_registered = 0;
  for (const std::size_t size : {920'000, 1'000'000, 950'000}) {
    MutableBuffer sent = pool.allocate(size);
    for (std::size_t i = 0; i < 2; ++i) {
      const auto grant = b.connections[i]->allocate_grant(size);
      a.connections[i]->fill_grant(grant->place, sent);
    }
    sent = {};
    wait_until(a, b, [&] { return pool.retained_bytes() > 0; });  // both have written from it
  }
  CHECK_EQ(sources_registered, 1);
});

// --- memory of CUDA devices, of a driver that has none

int blocks_registered = 0;
ibv_mr* count_blocks(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t address,
                     int dmabuf, int access) {
  blocks_registered += access == 0 ? 1 : 100;
  return register_mapped(domain, offset, bytes, address, dmabuf, access);
}

const OnDevice direct("parts are written from a CUDA device's memory, registered once", [] {
  Library table = real();
  table.reg_dmabuf_mr = count_blocks;
  Pair pair(subject_with(table, 3, true), subject_with(real()));
  if (!pair.connected) return;
  blocks_registered = 0;
  CHECK(pair.a.connection().reads_device(0));
  CHECK(!pair.b.connection().reads_device(0));  // it was not asked to
  for (const std::size_t size : {300'000, 5 << 20, 300'000, 5 << 20}) {
    const Buffer bytes = pattern(size, size);
    const Buffer sent = device::fake::on_device(bytes, 1);
    CHECK_EQ(pair.a.connection().refusal_of(sent), "");
    CHECK(same_bytes(pair.write(sent), bytes));
  }
  CHECK(blocks_registered >= 2 && blocks_registered <= 4);  // a block may still be in use
});

const OnDevice refused(
    "a device's memory that cannot be registered is refused, with the reason", [] {
      const Buffer bytes = pattern(300'000, 1);
      const auto refusal = [&](const Library& table, bool wanted) {
        Pair pair(subject_with(table, 2, wanted), subject_with(real()));
        if (!pair.connected) return std::string();
        CHECK_EQ(pair.a.connection().reads_device(0), wanted);  // nothing was tried yet
        const Buffer sent = device::fake::on_device(bytes, 0);
        std::string reason = pair.a.connection().refusal_of(sent);
        CHECK(!pair.a.connection().reads_device(0));
        const auto grant = pair.b.connection().allocate_grant(bytes.size());
        if (wanted) {
          CHECK_THROWS(pair.a.connection().fill_grant(grant->place, sent), ErrorCode::error);
        }
        CHECK(same_bytes(pair.write(bytes), bytes));  // the host's memory is read as ever
        return reason;
      };
      Library old = real();
      old.reg_dmabuf_mr = nullptr;
      says(refusal(real(), true), "cannot be registered (dmabuf)");  // soft-RoCE knows none
      says(refusal(old, true), "too old");
      says(refusal(real(), false), "MOOLINK_VERBS_GPUDIRECT");
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

// As a limit on locked memory: so many regions, and no more.
int regions_left = 0;
ibv_mr* register_few(ibv_pd* domain, void* address, std::size_t bytes, int access) {
  if (regions_left > 0) {
    --regions_left;
    return real().reg_mr(domain, address, bytes, access);
  }
  errno = ENOMEM;
  return nullptr;
}
int end_registration(ibv_mr* region) {
  ++regions_left;
  return real().dereg_mr(region);
}

const OnDevice room("what is registered to be sent again makes room for a grant", [] {
  Library limited = real();
  limited.reg_mr = register_few;
  limited.dereg_mr = end_registration;
  regions_left = 1000;
  Pair pair(limited);
  if (!pair.connected) return;
  memory::Pool pool;
  MutableBuffer sent = pool.allocate(1'000'000);
  std::memset(sent.data(), 1, sent.size());
  CHECK(same_bytes(pair.write(sent), sent));
  sent = {};
  wait_until(pair.a, pair.b, [&] { return pool.retained_bytes() > 0; });
  regions_left = 0;  // its block has the last one
  CHECK(pair.a.connection().allocate_grant(100'000).has_value());
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

}  // namespace verbs_transport_test
}  // namespace moolink::transport::verbs
