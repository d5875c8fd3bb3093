// Parts in the memory of a CUDA device, on paths that cannot read it there.

#include "runtime/device_parts.h"

#include <cstring>
#include <memory>
#include <variant>
#include <vector>

#include "check.h"
#include "device/fake_cuda.h"
#include "runtime/rpc_peer.h"

namespace moolink::runtime {
namespace {

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

TEST("device: parts of calls arrive by tcp and by shared memory, small and large") {
  device::fake::load();
  for (const std::vector<wire::PathKind>& transports :
       {std::vector{wire::PathKind::tcp}, std::vector{wire::PathKind::shm, wire::PathKind::tcp}}) {
    const auto contexts = {Context::create({}), Context::create({})};
    std::vector<std::shared_ptr<RpcPeer>> peers;
    for (const auto& context : contexts) {
      RpcOptions options;
      options.name = peers.empty() ? "server" : "client";
      options.transports = transports;
      peers.push_back(RpcPeer::create(context, std::move(options)));
    }
    peers[0]->define("echo", [](const Incoming& call) { call.responder->send(call.arguments); });
    peers[1]->connect(peers[0]->listen("127.0.0.1:0").at(0));
    for (const std::size_t size : {100, 70'000, 300'000, 9'000'000}) {
      const Buffer expected = pattern(size);
      wire::Payload arguments{HeapAllocator().allocate(8), {}};
      arguments.parts = {device::fake::on_device(expected, 0), expected};
      const auto future = peers[1]->call("server", "echo", std::move(arguments), kCallTimeout, 1);
      CHECK(future->wait(io::now() + kCallTimeout, {}));
      const auto& answer = std::get<wire::Payload>(future->outcome());
      CHECK_EQ(answer.parts.size(), std::size_t{2});
      for (const Buffer& part : answer.parts) CHECK(same_bytes(part, expected));
    }
    CHECK(!peers[1]->reads_devices("server"));
    for (const auto& peer : peers) peer->close();
    for (const auto& context : contexts) context->stop();
  }
}

}  // namespace
}  // namespace moolink::runtime
