// A connection that lacks memory, over a device that ends nothing: it fails, and nothing else does.

#include <memory>
#include <new>

#include "check.h"
#include "conformance.h"
#include "fake_verbs.h"
#include "tcp_subject.h"
#include "transport/verbs/connection.h"

namespace moolink::transport::verbs {
namespace verbs_barrier_test {

bool lacks_memory = false;
ibv_qp pair_of_all{};
ibv_cq queue_of_all{};
ibv_srq slots_of_all{};
ibv_comp_channel channel_of_all{nullptr, -1, 0};
ibv_context* (*open_fake)(ibv_device*) = nullptr;

ibv_context* open_device(ibv_device* device) {
  ibv_context* context = open_fake(device);
  context->async_fd = context->cmd_fd = -1;
  return context;
}

int post_send(ibv_qp*, ibv_send_wr*, ibv_send_wr**) {
  if (lacks_memory) throw std::bad_alloc();
  return 0;
}

Library idle_library(const FakeVerbs& fake) {
  Library library = fake.library();
  open_fake = library.open_device;
  library.open_device = open_device;
  library.create_comp_channel = [](ibv_context*) { return &channel_of_all; };
  library.destroy_comp_channel = [](ibv_comp_channel*) { return 0; };
  library.create_cq = [](ibv_context*, int, void*, ibv_comp_channel*, int) {
    return &queue_of_all;
  };
  library.destroy_cq = [](ibv_cq*) { return 0; };
  library.create_srq = [](ibv_pd*, ibv_srq_init_attr*) { return &slots_of_all; };
  library.destroy_srq = [](ibv_srq*) { return 0; };
  library.create_qp = [](ibv_pd*, ibv_qp_init_attr*) { return &pair_of_all; };
  library.modify_qp = [](ibv_qp*, ibv_qp_attr*, int) { return 0; };
  library.destroy_qp = [](ibv_qp*) { return 0; };
  library.post_send = post_send;
  library.poll_cq = [](ibv_cq*, int, ibv_wc*) { return 0; };
  library.req_notify_cq = [](ibv_cq*, int) { return 0; };
  return library;
}

// Takes what is said over the control connection.
class Control final : public Connection {
 public:
  wire::ConnectionId id() const override { return 1; }
  wire::PathKind path() const override { return wire::PathKind::tcp; }
  const wire::PathTraits& traits() const override { return traits_; }
  const std::string& peer_address() const override { return address_; }
  void write(wire::Frame) override {}
  void flush() override {}
  std::size_t queued_bytes() const override { return 0; }
  bool writable() const override { return true; }
  void establish() override {}
  void close() override {}

 private:
  wire::PathTraits traits_;
  std::string address_ = "tcp://10.0.0.1:1";
};

struct Owner final : ConnectionOwner {
  void ended(wire::ConnectionId) override { over = true; }
  bool over = false;
};

// An open connection of a side.
struct Open {
  Open() {
    fake.add({"a", {{.gids = {{gid_of("::ffff:10.77.0.1")}}}}});
    const Port port = choose(fake.library(), fake.preferences()).port.value();
    const auto device = std::make_shared<Device>(library, port);
    connection = std::make_shared<VerbsConnection>(side.environment, owner, device,
                                                   std::make_shared<Control>(), "verbs://10.0.0.1");
    connection->start();
    Endpoint there;
    there.mtu = IBV_MTU_4096;
    there.credits = 8;
    there.pairs = {{1, 1}};
    const wire::Frame told = wire::make_frame(wire::FrameType::message, there);
    connection->told({told.header, told.control});
    CHECK_EQ(side.connections.size(), 1u);
    connection->write(conformance::message_frame(1, 100));
    lacks_memory = true;
  }
  ~Open() {
    lacks_memory = false;
    connection->drop();
  }

  FakeVerbs fake;
  const Library library = idle_library(fake);
  Owner owner;
  conformance::Side side{with_keys({})};
  std::shared_ptr<VerbsConnection> connection;
};

TEST("verbs: a flush without memory fails the connection, and throws nothing") {
  Open open;
  open.connection->flush();
  CHECK(!open.owner.over);  // only the loop reports it
  conformance::wait_until(open.side, [&] { return open.owner.over; });
  CHECK_EQ(open.side.closures.size(), 1u);
  CHECK(open.side.closures.at(0).message.find("out of memory") != std::string::npos);
}

TEST("verbs: a close without memory ends the connection, and throws nothing") {
  Open open;
  open.connection->close();
  conformance::wait_until(open.side, [&] { return open.owner.over; });
  CHECK(open.side.closures.empty());
}

}  // namespace verbs_barrier_test
}  // namespace moolink::transport::verbs
