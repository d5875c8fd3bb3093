#include "transport/shm/transport.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "conformance.h"
#include "io/doorbell.h"
#include "shm_subject.h"
#include "transport/shm/address.h"

namespace moolink::transport {
namespace shm_transport_test {

using conformance::message_frame;
using conformance::Side;
using conformance::wait_until;

const bool kAdded = [] {
  conformance::add_tests(shm_subject());
  return true;
}();

// A side that remembers whether it was told of a death.
class Witness : public Side {
 public:
  Witness() : Side(shm_subject()) {}
  void closed(Connection& connection, const Error& error, bool dead) override {
    Side::closed(connection, error, dead);
    peer_dead = dead;
  }
  void shared(Connection&, const Uid& key, std::vector<Descriptor> descriptors) override {
    shares.emplace_back(key, std::move(descriptors));
  }
  std::string listen() { return transport->listen("shm://").at(0); }

  std::optional<bool> peer_dead;
  std::vector<std::pair<Uid, std::vector<Descriptor>>> shares;
};

// A client that does the handshake by hand, as a hostile or broken process might.
class RawClient {
 public:
  explicit RawClient(const std::string& address)
      : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    const shm::SocketAddress target(shm::parse_address(address).name);
    CHECK_EQ(::connect(socket_.get(), target.get(), target.size), 0);
  }

  void greet() {
    const std::array<int, 2> passed{own_ring->descriptor(), bell.rung.get()};
    shm::Notice notice;
    notice.kind = shm::NoticeKind::greeting;
    CHECK(shm::send_notice(socket_.get(), notice, passed));
  }
  // The ring that the server reads.
  void take_greeting() {
    io::DescriptorMessage message;
    CHECK(io::receive_message(socket_.get(), message) == io::Received::message);
    peer_ring = shm::map_ring(std::move(message.descriptors.at(0)));
    peer_bell = std::move(message.descriptors.at(1));
  }
  shm::RingWords& words() { return *reinterpret_cast<shm::RingWords*>(peer_ring->data()); }
  void close() { socket_.reset(); }
  int socket() const { return socket_.get(); }

  std::shared_ptr<memory::Segment> own_ring = shm::make_ring(1 << 16);
  io::Doorbell bell = io::make_doorbell();
  std::shared_ptr<memory::Segment> peer_ring;
  Descriptor peer_bell;

 private:
  Descriptor socket_;
};

bool wait_for(Side& side, const std::function<bool()>& condition) {
  Side idle(shm_subject());
  return wait_until(side, idle, condition);
}

TEST("shm: addresses") {
  const auto parsed = shm::parse_address("shm://abcd/moolink-1");
  CHECK_EQ(parsed.host, "abcd");
  CHECK_EQ(parsed.name, "moolink-1");
  CHECK_EQ(parsed.text(), "shm://abcd/moolink-1");
  CHECK(shm::parse_address("shm://").name.empty());
  CHECK(shm::is_shm_address("shm://a/b"));
  CHECK(!shm::is_shm_address("tcp://1.2.3.4:5"));
  for (const std::string wrong : {"", "shm", "shm:/", "tcp://a/b", "shm://abc", "shm://a/b/c",
                                  "shm://a/b c", "shm://a/\x01"}) {
    CHECK_THROWS(shm::parse_address(wrong), ErrorCode::invalid_argument);
  }
  CHECK_THROWS(shm::parse_address("shm://a/" + std::string(108, 'x')), ErrorCode::invalid_argument);
  CHECK_EQ(shm::parse_address("shm://a/" + std::string(107, 'x')).name.size(), 107u);
}

TEST("shm: an address of another host fails with the reason, one's own name only once") {
  Witness side;
  const std::string address = "shm://" + Uid{7, 7}.hex() + "/somebody";
  side.transport->dial(address);
  CHECK(side.dial_failures.empty());
  wait_for(side, [&] { return side.dial_failures.size() == 1; });
  CHECK(side.dial_failures[0].code == ErrorCode::error);
  CHECK(side.dial_failures[0].message.find("another host") != std::string::npos);
  CHECK_THROWS(side.transport->listen(address), ErrorCode::invalid_argument);
  CHECK_THROWS(side.transport->listen(side.listen()), ErrorCode::error);
}

TEST("shm: what a dead process wrote is received, then its death is told") {
  Witness parent;
  const std::string address = parent.listen();
  const pid_t child = ::fork();
  if (child == 0) {
    Side side(shm_subject());
    side.transport->dial(address);
    while (side.connections.empty()) side.turn();
    for (std::uint64_t i = 1; i <= 3; ++i) side.send(message_frame(i, 1000));
    ::_exit(0);  // as SIGKILL would: no farewell
  }
  wait_for(parent, [&] { return parent.peer_dead.has_value(); });
  CHECK_EQ(parent.frames.size(), 3u);
  CHECK(parent.peer_dead == true);
  CHECK(parent.closures.at(0).code == ErrorCode::peer_lost);
  CHECK_EQ(::waitpid(child, nullptr, 0), child);
}

TEST("shm: a death is told though a child of the dead holds its socket") {
  Witness parent;
  const std::string address = parent.listen();
  int hold[2];
  CHECK_EQ(::pipe(hold), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(hold[1]);
    Side side(shm_subject());
    side.transport->dial(address);
    while (side.connections.empty()) side.turn();
    if (::fork() == 0) {
      char byte;
      [[maybe_unused]] const ssize_t n = ::read(hold[0], &byte, 1);
    }
    ::_exit(0);
  }
  ::close(hold[0]);
  wait_for(parent, [&] { return parent.peer_dead.has_value(); });
  CHECK(parent.peer_dead == true);
  ::close(hold[1]);
  CHECK_EQ(::waitpid(child, nullptr, 0), child);
}

TEST("shm: an end of file of a living process closes the connection and is no death") {
  Witness server;
  RawClient client(server.listen());
  client.greet();
  wait_for(server, [&] { return server.connections.size() == 1; });
  client.close();
  wait_for(server, [&] { return server.peer_dead.has_value(); });
  CHECK(server.peer_dead == false);
  CHECK(server.closures.at(0).code == ErrorCode::peer_lost);
}

TEST("shm: a forked child that abandons its transport does not disturb the parent") {
  Witness a;
  Witness b;
  if (!conformance::connect(shm_subject(), a, b)) return;
  const pid_t child = ::fork();
  if (child == 0) {
    a.transport->abandon();
    b.transport->abandon();
    a.loop.abandon();
    b.loop.abandon();
    ::_exit(0);
  }
  CHECK_EQ(::waitpid(child, nullptr, 0), child);
  a.send(message_frame(1, 1000));
  wait_until(a, b, [&] { return b.frames.size() == 1; });
  CHECK(!a.peer_dead && !b.peer_dead);
}

TEST("shm: a greeting that is none is refused and nothing is opened") {
  const auto refused = [](const std::function<void(RawClient&)>& greet) {
    Witness server;
    RawClient client(server.listen());
    greet(client);
    io::DescriptorMessage message;
    wait_for(server,
             [&] { return io::receive_message(client.socket(), message) == io::Received::end; });
    CHECK(server.connections.empty());
  };
  shm::Notice greeting;
  greeting.kind = shm::NoticeKind::greeting;
  const auto send = [](RawClient& client, const shm::Notice& notice, std::vector<int> passed) {
    CHECK(shm::send_notice(client.socket(), notice, passed));
  };
  refused([](RawClient& client) { CHECK_EQ(::send(client.socket(), "hello", 5, 0), 5); });
  refused([&](RawClient& client) { send(client, greeting, {}); });
  refused([&](RawClient& client) { send(client, greeting, {client.own_ring->descriptor()}); });
  refused([&](RawClient& client) {
    send(client, greeting, {client.own_ring->descriptor(), client.own_ring->descriptor()});
  });
  refused([&](RawClient& client) {
    const Descriptor event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    send(client, greeting, {client.own_ring->descriptor(), event.get()});
  });
  refused([&](RawClient& client) {
    const Descriptor shrinkable(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK_EQ(::ftruncate(shrinkable.get(), 2 * 4096), 0);
    send(client, greeting, {shrinkable.get(), client.bell.rung.get()});
  });
  refused([&](RawClient& client) {
    shm::Notice stranger = greeting;
    stranger.magic ^= 1;
    send(client, stranger, {client.own_ring->descriptor(), client.bell.rung.get()});
  });
  refused([&](RawClient& client) {
    shm::Notice newer = greeting;
    ++newer.version;
    send(client, newer, {client.own_ring->descriptor(), client.bell.rung.get()});
  });
  refused([&](RawClient& client) { send(client, shm::Notice{}, {}); });
}

TEST("shm: whoever connects and says nothing is forgotten in time") {
  Witness server;
  server.environment.handshake_timeout = milliseconds(100);
  RawClient client(server.listen());
  io::DescriptorMessage message;
  wait_for(server,
           [&] { return io::receive_message(client.socket(), message) == io::Received::end; });
  CHECK(server.connections.empty());
}

TEST("shm: hostile positions and bytes close the connection with a wire error") {
  const auto closed_by = [](const std::function<void(RawClient&)>& attack) {
    Witness server;
    RawClient client(server.listen());
    client.greet();
    wait_for(server, [&] { return server.connections.size() == 1; });
    client.take_greeting();
    attack(client);
    server.send(message_frame(1, 100));
    wait_for(server, [&] { return server.closures.size() == 1; });
    CHECK(server.closures.at(0).code == ErrorCode::wire);
    CHECK(server.frames.empty());
    CHECK(server.peer_dead == false);
  };
  closed_by([](RawClient& client) { client.words().tail.store(~std::uint64_t{0}); });
  closed_by([](RawClient& client) { client.words().tail.store((1 << 20) + 1); });
  closed_by([](RawClient& client) { client.words().tail.store(1 << 20); });  // zeros: no header
  closed_by([](RawClient& client) {
    shm::RingWriter writer(client.peer_ring, client.peer_bell);
    const auto noise = conformance::pattern(5000, 1);
    writer.write(noise.span());
    writer.publish();
  });
  closed_by([](RawClient& client) {  // a chunk whose head tells another size than its frame
    auto frame = conformance::chunk_frame(1, 0, conformance::pattern(100, 1));
    frame.header.length += 1;
    frame.payload.push_back(conformance::pattern(1, 1));
    shm::RingWriter writer(client.peer_ring, client.peer_bell);
    SendQueue queue(1, 1);
    queue.push(std::move(frame));
    queue.write_to(writer);
  });
}

TEST("shm: a hostile position of the reader closes the connection with a wire error") {
  Witness server;
  RawClient client(server.listen());
  client.greet();
  wait_for(server, [&] { return server.connections.size() == 1; });
  reinterpret_cast<shm::RingWords*>(client.own_ring->data())->head.store(1 << 30);
  server.send(message_frame(1, 1 << 20));  // more than the ring holds, so that it looks
  wait_for(server, [&] { return server.closures.size() == 1; });
  CHECK(server.closures.at(0).code == ErrorCode::wire);
}

TEST("shm: descriptors are shared under a key") {
  Witness a;
  Witness b;
  if (!conformance::connect(shm_subject(), a, b)) return;
  const auto segment = memory::Segment::create(1 << 16, "moolink-test");
  const io::Doorbell bell = io::make_doorbell();
  const std::array<int, 2> passed{segment->descriptor(), bell.rung.get()};
  CHECK(a.connection().share(Uid{1, 2}, passed));
  wait_until(a, b, [&] { return b.shares.size() == 1; });
  CHECK(b.shares[0].first == (Uid{1, 2}));
  CHECK_EQ(b.shares[0].second.size(), 2u);
  const auto mapped = memory::Segment::map(std::move(b.shares[0].second[0]), 1 << 20);
  std::memcpy(segment->data(), "moolink", 7);
  CHECK_EQ(std::memcmp(mapped->data(), "moolink", 7), 0);
  b.connection().close();
  wait_until(a, b, [&] { return a.closures.size() == 1; });
  CHECK(!a.connection().share(Uid{1, 2}, passed));
}

TEST("shm: a stranger can share nothing") {
  Witness server;
  server.establish_on_open = false;
  RawClient client(server.listen());
  client.greet();
  wait_for(server, [&] { return server.connections.size() == 1; });
  shm::Notice notice;
  notice.kind = shm::NoticeKind::share;
  const std::array<int, 1> passed{client.own_ring->descriptor()};
  for (int i = 0; i < 5; ++i) CHECK(shm::send_notice(client.socket(), notice, passed));
  wait_for(server, [&] { return server.closures.size() == 1; });
  CHECK(server.closures.at(0).code == ErrorCode::wire);
  CHECK(server.shares.empty());
}

TEST("shm: descriptors that overtake the greeting are told after it") {
  Witness a;
  Witness b;
  b.establish_on_open = false;
  if (!conformance::connect(shm_subject(), a, b)) return;
  const io::Doorbell bell = io::make_doorbell();
  const std::array<int, 1> passed{bell.rung.get()};
  CHECK(a.connection().share(Uid{1, 2}, passed));
  a.send(message_frame(1, 10));
  wait_until(a, b, [&] { return b.frames.size() == 1; });
  b.turn();
  CHECK(b.shares.empty());
  b.connection().establish();
  wait_until(a, b, [&] { return b.shares.size() == 1; });
}

TEST("shm: a notice out of place closes the connection with a wire error") {
  Witness server;
  RawClient client(server.listen());
  client.greet();
  wait_for(server, [&] { return server.connections.size() == 1; });
  CHECK_EQ(::send(client.socket(), "hello", 5, 0), 5);
  wait_for(server, [&] { return server.closures.size() == 1; });
  CHECK(server.closures.at(0).code == ErrorCode::wire);
}

TEST("shm: an answer to a segment that was never passed closes the connection with a wire error") {
  Witness server;
  RawClient client(server.listen());
  client.greet();
  wait_for(server, [&] { return server.connections.size() == 1; });
  CHECK(shm::send_notice(client.socket(), {.kind = shm::NoticeKind::mapped, .segment = 1}, {}));
  wait_for(server, [&] { return server.closures.size() == 1; });
  CHECK(server.closures.at(0).code == ErrorCode::wire);
}

TEST("shm: a peer that rings without end keeps its connection, and keeps nobody from others") {
  Witness server;
  Witness friendly;
  if (!conformance::connect(shm_subject(), friendly, server)) return;
  RawClient client(server.listen());
  client.greet();
  wait_for(server, [&] { return server.connections.size() == 2; });
  client.take_greeting();
  std::atomic<bool> over{false};
  std::thread ringing([&] {
    while (!over) io::ring(client.peer_bell);
  });
  for (std::uint64_t n = 1; n <= 100; ++n) {
    friendly.send(message_frame(n, 1000));
    wait_until(friendly, server, [&] { return server.frames.size() == n; });
  }
  over = true;
  ringing.join();
  CHECK(server.closures.empty());
}

// Both sides sleep in the kernel between messages, so that every one needs a ring of the doorbell.
TEST("shm: two threads that sleep between messages lose no wake-up") {
  Witness a;
  Witness b;
  if (!conformance::connect(shm_subject(), a, b)) return;
  static constexpr std::uint64_t kTrips = 3000;
  const auto run = [](Side& side, bool begins) {
    const Time deadline = io::now() + seconds(60);
    std::uint64_t sent = 0;
    std::unique_lock lock(side.engine);
    const auto send = [&] {
      const std::size_t bytes = sent % 50 == 0 ? 3 << 20 : 100;  // sometimes more than a ring
      side.connection().write(message_frame(++sent, bytes));
      side.connection().flush();
    };
    if (begins) send();
    while (side.frames.size() < kTrips && io::now() < deadline) {
      side.loop.turn(lock, deadline);
      while (sent < side.frames.size() + (begins ? 1u : 0u) && sent < kTrips) send();
    }
    while (side.connection().queued_bytes() > 0 && io::now() < deadline) {
      side.loop.turn(lock, deadline);
    }
    CHECK_EQ(side.frames.size(), kTrips);
  };
  std::thread other([&] { run(b, false); });
  run(a, true);
  other.join();
}

}  // namespace shm_transport_test
}  // namespace moolink::transport
