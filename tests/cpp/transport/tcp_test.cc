#include "transport/tcp/transport.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "check.h"
#include "conformance.h"
#include "transport/tcp/address.h"

namespace moolink::transport {
namespace {

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

// A client that is no moolink peer.
Descriptor plain_socket(const std::string& address) {
  const auto target = tcp::resolve(tcp::parse_address(address)).at(0);
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK_EQ(::connect(socket.get(), target.get(), target.size), 0);
  return socket;
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
    const auto header = wire::encode_header(frame.header);
    bytes.insert(bytes.end(), header.begin(), header.end());
    const auto append = [&](const Buffer& piece) {
      bytes.insert(bytes.end(), piece.data(), piece.data() + piece.size());
    };
    append(frame.control);
    for (const Buffer& piece : frame.payload) append(piece);
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

}  // namespace
}  // namespace moolink::transport
