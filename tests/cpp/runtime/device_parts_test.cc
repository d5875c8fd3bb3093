// Parts in the memory of a CUDA device, on paths that cannot read it there.

#include "runtime/peer/device_parts.h"

#include <cstring>
#include <memory>
#include <variant>
#include <vector>

#include "check.h"
#include "device/fake_cuda.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {
namespace device_parts_test {

constexpr Duration kCallTimeout = seconds(30);

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
  bring_to_host(frame, heap);
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

  RpcPeer& client() { return *peers_[1]; }
  rpc::Reply call(std::vector<Buffer> parts) {
    wire::Payload arguments{HeapAllocator().allocate(8), std::move(parts)};
    const auto future = client().call("server", "echo", std::move(arguments), kCallTimeout, 1);
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
    const std::string server = "server";
    CHECK(!echo.client().reads_devices(&server));
  }
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
