#pragma once

// What every transport must do, run over each of them: add_tests("tcp", {...}).

#include <functional>
#include <memory>
#include <string>

#include "base/buffer.h"
#include "io/loop.h"
#include "transport/transport.h"

namespace moolink::transport::conformance {

struct Subject {
  std::string name;  // prefix of the tests' names
  std::function<std::unique_ptr<Transport>(Environment&)> make;
  std::string listen_address;     // any free place
  std::string malformed_address;  // of this transport's kind
};

// Registers the whole suite.
void add_tests(const Subject& subject);

// One side of a connection: a loop, a transport and a handler that keeps what it is told.
class Side : public Handler {
 public:
  explicit Side(const Subject& subject, Limits limits = {}, std::size_t max_unauthenticated = 256);
  ~Side() override;

  void opened(std::shared_ptr<Connection> connection, const std::string& dialled) override;
  void closed(Connection& connection, const Error& error, bool peer_dead) override;
  void dial_failed(const std::string& address, const Error& error) override;
  void turned_away(const Error& error) override;
  void received(Connection& connection, wire::ReceivedFrame frame) override;
  std::span<std::byte> chunk_target(Connection& connection, const wire::ChunkHead& head) override;
  void chunk_received(Connection& connection, const wire::ChunkHead& head) override;
  void writable(Connection& connection) override;
  void grant_filled(Connection& connection, const wire::GrantPlace& place) override;

  // One turn of the loop that waits for at most `wait`.
  void turn(Duration wait = milliseconds(2));
  Connection& connection() { return *connections.at(0); }
  void send(wire::Frame frame);

  io::Loop loop;
  std::mutex engine;
  HeapAllocator allocator;
  Environment environment;
  std::unique_ptr<Transport> transport;

  bool establish_on_open = true;
  bool fails_to_open = false;                // opened() throws when it has taken the connection
  std::uint64_t features = wire::kFeatures;  // of both peers, as this side is told
  bool close_on_frame = false;
  bool discard_chunks = false;
  std::vector<std::shared_ptr<Connection>> connections;
  std::vector<std::string> dialled;
  std::vector<wire::ReceivedFrame> frames;
  std::map<std::uint64_t, MutableBuffer> parts;  // by seq
  std::vector<wire::ChunkHead> chunks;
  std::vector<Error> closures;
  std::vector<Error> dial_failures;
  std::vector<Error> refusals;  // of strangers
  std::vector<wire::GrantPlace> filled;
  int writable_calls = 0;
};

// Turns both loops, or the one, until the condition holds; fails the test after 20 s, or what
// MOOLINK_TEST_TIMEOUT says.
bool wait_until(Side& a, Side& b, const std::function<bool()>& condition);
bool wait_until(Side& side, const std::function<bool()>& condition);
// b listens, a dials; both have one connection afterwards.
bool connect(const Subject& subject, Side& a, Side& b);

Buffer pattern(std::size_t size, std::uint64_t seed);
bool same_bytes(const Buffer& a, const Buffer& b);
wire::Frame message_frame(std::uint64_t seq, std::size_t bytes);
// That these have arrived, numbered from 1, and nothing else.
void check_messages(const Side& side, const std::vector<std::size_t>& sizes);
wire::Frame chunk_frame(std::uint64_t seq, std::size_t offset, const Buffer& bytes);

}  // namespace moolink::transport::conformance
