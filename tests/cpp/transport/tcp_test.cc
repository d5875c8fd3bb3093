#include "transport/tcp/transport.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "conformance.h"
#include "tcp_subject.h"
#include "transport/tcp/address.h"
#include "transport/tcp/interface.h"

namespace moolink::transport {
namespace tcp_test {

using conformance::Side;
using conformance::Subject;
using conformance::wait_until;

const Subject& subject() {
  static const Subject tcp_subject{
      "tcp",
      [](Environment& environment) { return std::make_unique<tcp::TcpTransport>(environment); },
      "tcp://127.0.0.1:0", "tcp://127.0.0.1:port"};
  return tcp_subject;
}

const bool kAdded = [] {
  conformance::add_tests(subject());
  return true;
}();

std::vector<std::byte> bytes_of(const wire::Frame& frame) {
  const auto header = wire::encode_header(frame.header);
  std::vector<std::byte> bytes(header.begin(), header.end());
  const auto append = [&](const Buffer& piece) {
    bytes.insert(bytes.end(), piece.data(), piece.data() + piece.size());
  };
  append(frame.control);
  for (const Buffer& piece : frame.payload) append(piece);
  return bytes;
}

TEST("tcp: addresses as people write them") {
  const auto host_port = [](const char* text) {
    const tcp::HostPort parsed = tcp::parse_address(text);
    return parsed.host + "|" + std::to_string(parsed.port);
  };
  CHECK_EQ(host_port("tcp://127.0.0.1:4431"), "127.0.0.1|4431");
  CHECK_EQ(host_port("example.org:1"), "example.org|1");
  CHECK_EQ(host_port("[::1]:65535"), "::1|65535");
  CHECK_EQ(host_port(":4431"), "|4431");
  CHECK_EQ(host_port("*:4431"), "|4431");
  CHECK_EQ(host_port("4431"), "|4431");
  for (const char* wrong : {"", "tcp://", "localhost", "1.2.3.4:", "1.2.3.4:65536", "1.2.3.4:-1",
                            "::1:4431", "[::1]", "[::1]4431", "[zz]:1", "a:1/x", "a b:1"}) {
    CHECK_THROWS(tcp::parse_address(wrong), ErrorCode::invalid_argument);
  }
  CHECK(tcp::is_tcp_address("1.2.3.4:5"));
  CHECK(!tcp::is_tcp_address("shm://boot/name"));
}

TEST("tcp: bytes that are no frames close the connection") {
  Side server(subject());
  Side idle(subject());
  const auto address = server.transport->listen("127.0.0.1:0").at(0);
  const Descriptor client = plain_socket(address);
  const char request[] = "GET / HTTP/1.1\r\nHost: moolink\r\nUser-Agent: a browser\r\n\r\n";
  CHECK_EQ(::send(client.get(), request, sizeof request, 0), static_cast<ssize_t>(sizeof request));
  wait_until(server, idle, [&] { return server.closures.size() == 1; });
  CHECK(server.closures[0].code == ErrorCode::wire);
  CHECK(server.frames.empty());
}

TEST("tcp: frames that come byte by byte") {
  Side server(subject());
  Side idle(subject());
  const auto address = server.transport->listen("127.0.0.1:0").at(0);
  const Descriptor client = plain_socket(address);
  server.parts[9] = server.allocator.allocate(300);
  std::vector<std::byte> bytes;
  for (const wire::Frame& frame : {conformance::message_frame(1, 100),
                                   conformance::chunk_frame(9, 0, conformance::pattern(300, 9))}) {
    const auto of_frame = bytes_of(frame);
    bytes.insert(bytes.end(), of_frame.begin(), of_frame.end());
  }
  for (const std::byte& byte : bytes) {
    CHECK_EQ(::send(client.get(), &byte, 1, 0), 1);
    server.turn();
  }
  wait_until(server, idle, [&] { return server.chunks.size() == 1; });
  CHECK_EQ(server.frames.size(), 1u);
  CHECK(conformance::same_bytes(server.frames[0].payload(), conformance::pattern(100, 1)));
  CHECK(conformance::same_bytes(server.parts[9], conformance::pattern(300, 9)));
}

TEST("tcp: one readiness takes a bounded number of small frames") {
  Side server(subject());
  Side idle(subject());
  const auto address = server.transport->listen("127.0.0.1:0").at(0);
  const Descriptor client = plain_socket(address);
  wait_until(server, idle, [&] { return server.connections.size() == 1; });
  const auto frame = bytes_of(conformance::message_frame(1, 100));
  std::vector<std::byte> many;
  while (many.size() < std::size_t{1} << 20) many.insert(many.end(), frame.begin(), frame.end());
  // As much as both kernels hold, and more while they are emptied.
  std::thread sender([&] {
    while (::send(client.get(), many.data(), many.size(), MSG_NOSIGNAL) > 0) {
    }
  });
  std::size_t most = 0;
  for (std::size_t before = 0; before < 8 * many.size() / frame.size();) {
    server.turn();
    most = std::max(most, server.frames.size() - before);
    before = server.frames.size();
  }
  ::shutdown(client.get(), SHUT_RDWR);
  sender.join();
  CHECK(most * frame.size() <= std::size_t{640} << 10);
}

TEST("tcp: a port in use is said so, and SO_REUSEPORT is not set") {
  Side a(subject());
  Side b(subject());
  const auto address = a.transport->listen("127.0.0.1:0").at(0);
  try {
    b.transport->listen(address);
    CHECK(!"listened twice on one port");
  } catch (const Exception& e) {
    CHECK(e.error().message.find("in use") != std::string::npos);
    CHECK(e.error().message.find(address) != std::string::npos);
  }
  CHECK_THROWS(b.transport->listen("192.0.2.1:0"), ErrorCode::error);  // TEST-NET: not this host's
}

TEST("tcp: a wildcard listener announces addresses of interfaces and can be dialled at them") {
  for (const char* everywhere : {":0", "*:0", "0.0.0.0:0"}) {
    Side a(subject());
    Side b(subject());
    const auto addresses = b.transport->listen(everywhere);
    CHECK(addresses.size() >= 1);
    CHECK(addresses.at(0).starts_with("tcp://127.0.0.1:"));
    for (const std::string& address : addresses) {
      CHECK(address.find("0.0.0.0") == std::string::npos);
      CHECK(address.find("[::]") == std::string::npos);
      a.transport->dial(address);
    }
    wait_until(a, b, [&] {
      return a.connections.size() == addresses.size() && b.connections.size() == addresses.size();
    });
    CHECK(a.dial_failures.empty());
  }
}

TEST("tcp: names are resolved off the loop, and unknown ones reported") {
  Side a(subject());
  Side b(subject());
  const auto address = b.transport->listen("localhost:0").at(0);
  const std::string port = address.substr(address.rfind(':'));
  a.transport->dial("localhost" + port);
  wait_until(a, b, [&] { return a.connections.size() == 1; });
  a.transport->dial("no-such-host.invalid:1");
  wait_until(a, b, [&] { return a.dial_failures.size() == 1; });
  CHECK(a.dial_failures[0].code == ErrorCode::error);  // no proof that the peer is gone
  CHECK(a.dial_failures[0].message.find("no-such-host.invalid") != std::string::npos);
  CHECK_THROWS(a.transport->dial("127.0.0.1:0"), ErrorCode::invalid_argument);
}

TEST("tcp: what is advertised instead of what was bound") {
  const std::vector<std::string> bound = {"tcp://127.0.0.1:4431", "tcp://10.0.0.1:4431"};
  const auto told = [&](const char* text) { return tcp::advertised(text, bound).at(0); };
  CHECK_EQ(told("203.0.113.5"), "tcp://203.0.113.5:4431");
  CHECK_EQ(told("203.0.113.5:80"), "tcp://203.0.113.5:80");
  CHECK_EQ(told("tcp://gate.example.org:0"), "tcp://gate.example.org:4431");
  CHECK_EQ(told("gate.example.org"), "tcp://gate.example.org:4431");
  CHECK_EQ(told("2001:db8::1"), "tcp://[2001:db8::1]:4431");
  CHECK_EQ(told("[2001:db8::1]"), "tcp://[2001:db8::1]:4431");
  CHECK_EQ(told("[2001:db8::1]:5"), "tcp://[2001:db8::1]:5");
  for (const char* wrong : {"", ":80", "*", "a b", "[zz]", "host:port"}) {
    CHECK_THROWS(tcp::advertised(wrong, bound), ErrorCode::invalid_argument);
  }
}

tcp::SocketAddress address_of(const char* host) {
  return tcp::resolve(tcp::parse_address(std::string(host) + ":1")).at(0);
}

TEST("tcp: interfaces are chosen by name and by range") {
  const tcp::InterfaceChoice choice(" eth0, 10.1.0.0/15,fd00::/8 ,192.0.2.7/32");
  CHECK(!choice.all());
  CHECK(choice.allows("eth0", address_of("203.0.113.1")));
  CHECK(!choice.allows("eth1", address_of("203.0.113.1")));
  CHECK(choice.allows("eth1", address_of("10.0.0.1")));
  CHECK(choice.allows("eth1", address_of("10.1.255.255")));
  CHECK(!choice.allows("eth1", address_of("10.2.0.1")));
  CHECK(choice.allows("eth1", address_of("[fdff::1]")));
  CHECK(!choice.allows("eth1", address_of("[fe00::1]")));
  CHECK(choice.allows("eth1", address_of("192.0.2.7")));
  CHECK(!choice.allows("eth1", address_of("192.0.2.6")));
  CHECK(tcp::InterfaceChoice("").all());
  CHECK(tcp::InterfaceChoice("::/0").allows("eth1", address_of("192.0.2.6")));
  for (const char* wrong : {"10.0.0.0/33", "10.0.0.0/", "x/8", "/8", "fd00::/129", "10.0.0.0/8x"}) {
    CHECK_THROWS(tcp::InterfaceChoice{wrong}, ErrorCode::invalid_argument);
  }
  // Nothing is silently bound elsewhere.
  CHECK_THROWS(tcp::interface_addresses(tcp::InterfaceChoice("no-such-interface")),
               ErrorCode::error);
}

TEST("tcp: a chosen interface is bound and announced alone") {
  Side a(subject());
  Side b(subject());
  b.environment.interface = "127.0.0.0/8";
  b.transport = subject().make(b.environment);
  const auto addresses = b.transport->listen(":0");
  CHECK(!addresses.empty());
  const auto port = [](const std::string& address) { return address.substr(address.rfind(':')); };
  for (const std::string& address : addresses) {
    CHECK(address.starts_with("tcp://127.") || address.starts_with("tcp://[::1]"));
    CHECK_EQ(port(address), port(addresses.at(0)));
    a.transport->dial(address);
  }
  wait_until(a, b, [&] { return a.connections.size() == addresses.size(); });
  for (const tcp::SocketAddress& other : tcp::interface_addresses({})) {
    const std::string text = other.text();
    if (text.starts_with("tcp://127.") || text.starts_with("tcp://[::1]")) continue;
    a.transport->dial(text.substr(0, text.rfind(':')) + port(addresses.at(0)));
    wait_until(a, b, [&] { return a.dial_failures.size() == 1; });
    break;
  }
}

TEST("tcp: a link-local address names its interface") {
  tcp::SocketAddress address;
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address.storage);
  address.size = sizeof v6;
  v6.sin6_family = AF_INET6;
  CHECK_EQ(inet_pton(AF_INET6, "fe80::1", &v6.sin6_addr), 1);
  v6.sin6_scope_id = if_nametoindex("lo");
  address.set_port(5);
  CHECK_EQ(address.text(), "tcp://[fe80::1%lo]:5");
  CHECK_EQ(tcp::resolve(tcp::parse_address(address.text())).at(0).text(), address.text());
}

}  // namespace tcp_test
}  // namespace moolink::transport
