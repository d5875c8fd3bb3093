// Parts in the memory of a CUDA device, on paths that cannot read it there.

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <variant>
#include <vector>

#include "check.h"
#include "device/block.h"
#include "device/fake_cuda.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {
namespace device_parts_test {

constexpr Duration kCallTimeout = seconds(30);
const std::string kServer = "server";

Buffer pattern(std::size_t size) {
  const MutableBuffer bytes = HeapAllocator().allocate(size);
  for (std::size_t i = 0; i < size; ++i) {
    bytes.data()[i] = static_cast<std::byte>(i * 7 + i / 251);
  }
  return bytes;
}

bool same_bytes(const Buffer& a, const Buffer& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

TEST("device: parts of a frame come to the host, others stay where they are") {
  HeapAllocator heap;
  const Buffer host = pattern(1000);
  const Buffer expected = pattern(300'000);
  wire::Frame frame;
  frame.payload = {host, device::fake::on_device(expected, 1)};
  device::bring_to_host(frame.payload, heap);
  CHECK(frame.payload[0].data() == host.data());
  CHECK(device::block_of(frame.payload[1]) == nullptr);
  CHECK(same_bytes(frame.payload[1], expected));
}

// A server with an echo, and a client.
class Echo {
 public:
  explicit Echo(const std::vector<wire::PathKind>& transports) {
    for (const char* name : {"server", "client"}) {
      RpcOptions options;
      options.name = name;
      options.transports = transports;
      contexts_.push_back(Context::create({}));
      peers_.push_back(RpcPeer::create(contexts_.back(), std::move(options)));
    }
    peers_[0]->define("echo", [](const Incoming& call) { call.responder->send(call.arguments); });
    peers_[1]->connect(peers_[0]->listen("127.0.0.1:0").at(0));
  }
  ~Echo() {
    for (const auto& peer : peers_) peer->close();
    for (const auto& context : contexts_) context->stop();
  }
  Echo(const Echo&) = delete;
  Echo& operator=(const Echo&) = delete;

  RpcPeer& server() { return *peers_[0]; }
  RpcPeer& client() { return *peers_[1]; }
  rpc::Reply call(std::vector<Buffer> parts) {
    return call("echo", {HeapAllocator().allocate(8), std::move(parts)});
  }
  rpc::Reply call(const std::string& function, wire::Payload arguments) {
    const auto future = client().call("server", function, std::move(arguments), kCallTimeout, 1);
    CHECK(future->wait(io::now() + kCallTimeout, {}));
    return future->outcome();
  }

 private:
  std::vector<std::shared_ptr<Context>> contexts_;
  std::vector<std::shared_ptr<RpcPeer>> peers_;
};

// The processor that reads a device's memory itself is killed.
TEST("device: parts of calls arrive by tcp and by shared memory, small and large") {
  device::fake::load();
  for (const std::vector<wire::PathKind>& transports :
       {std::vector{wire::PathKind::tcp}, std::vector{wire::PathKind::shm, wire::PathKind::tcp}}) {
    Echo echo(transports);
    for (const std::size_t size : {100, 70'000, 300'000, 9'000'000}) {
      const Buffer expected = pattern(size);
      const auto outcome = echo.call({device::fake::on_device(expected, 0), expected});
      const auto& answer = std::get<wire::Payload>(outcome);
      CHECK_EQ(answer.parts.size(), std::size_t{2});
      for (const Buffer& part : answer.parts) CHECK(same_bytes(part, expected));
    }
    CHECK(!echo.client().reads_device(&kServer, 0));
  }
}

// As an encoder names it.
wire::LentPart lent_block(const Buffer& bytes, std::uint32_t part) {
  auto place = device::place_of(bytes);
  CHECK(place.has_value());
  return {part, place->block | wire::kDeviceSegments, place->offset, false, std::move(place->lent)};
}

// This process receives on the device from now on, and the client has heard of it.
void receive_on(Echo& echo, int device) {
  CHECK_EQ(device::fake::load().receives(device), "");
  while (!echo.client().reads_device(&kServer, device)) echo.call({pattern(100'000)});
}

TEST("device: a part is lent within the host to a peer that receives on its device") {
  Echo echo({wire::PathKind::shm, wire::PathKind::tcp});
  const Buffer expected = pattern(5'000'000);
  receive_on(echo, 1);
  std::atomic<bool> on_device{false};
  echo.server().define("look", [&](const Incoming& call) {
    const auto block = device::block_of(call.arguments.parts.at(0));
    on_device = block != nullptr && block->device() == 1;
    call.responder->send(call.arguments);
  });
  for (int i = 0; i < 3; ++i) {
    Buffer bytes = device::fake::on_device(expected, 1);
    const std::shared_ptr<const device::Block> block = device::block_of(bytes);
    wire::Payload arguments{HeapAllocator().allocate(8), {bytes}, {lent_block(bytes, 0)}};
    bytes = {};
    const auto answer = echo.call("look", std::move(arguments));
    CHECK(on_device);
    CHECK(same_bytes(std::get<wire::Payload>(answer).parts.at(0), expected));
    // Returned, and used again.
    const Time until = io::now() + kCallTimeout;
    while (block->lent() && io::now() < until) std::this_thread::yield();
    CHECK(!block->lent());
  }
}

TEST("device: a body in a device's memory ends the session") {
  Echo echo({wire::PathKind::shm, wire::PathKind::tcp});
  const Buffer expected = pattern(5'000'000);
  receive_on(echo, 1);
  // An honest peer never does this: its body is lent as if it were one of its parts.
  const Buffer bytes = device::fake::on_device(expected, 1);
  wire::Payload arguments{bytes, {}, {}};
  wire::LentPart lent = lent_block(bytes, 0);
  --lent.part;  // with_head() raises it to 0, the body
  arguments.lent.push_back(std::move(lent));
  const auto outcome = echo.call("echo", std::move(arguments));
  CHECK(std::holds_alternative<Error>(outcome));
}

TEST(
    "device: a part that CUDA does not give any more fails its call with CUDA's words, and no "
    "other") {
  Echo echo({wire::PathKind::tcp});
  const Buffer expected = pattern(300'000);
  CHECK(std::holds_alternative<wire::Payload>(echo.call({expected})));
  const Buffer lost = device::fake::on_device(expected, 0);
  device::fake::fail_next("copy", 700, 1000);
  const auto failed = echo.call({lost});
  device::fake::fail_next("copy", 0, 0);
  const auto& error = std::get<Error>(failed);
  CHECK(error.message.find("cuda:0") != std::string::npos);
  CHECK(std::holds_alternative<wire::Payload>(echo.call({expected})));
}

}  // namespace device_parts_test
}  // namespace moolink::runtime
