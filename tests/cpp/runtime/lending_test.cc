// Lending between contexts, as between processes: honest peers, and one that lies about its loans.

#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "io/loop.h"
#include "memory/lending_pool.h"
#include "rpc/node.h"
#include "runtime/peer/rpc_peer.h"
#include "transport/shm/transport.h"

namespace moolink::runtime {
namespace lending_test {

constexpr Duration kTimeout = seconds(30);
constexpr std::size_t kBytes = 200'000;

wire::Payload empty_payload() { return {HeapAllocator().allocate(8), {}}; }

// A payload whose one part lies in the pool.
wire::Payload lent_payload(memory::LendingPool& pool, std::size_t bytes = kBytes) {
  const MutableBuffer block = pool.allocate(bytes);
  std::memset(block.data(), 7, bytes);
  const auto place = pool.find(block.data(), bytes);
  wire::Payload payload = empty_payload();
  payload.parts = {block};
  payload.lent = {{0, place->segment, place->offset}};
  return payload;
}

std::shared_ptr<RpcPeer> make_peer(const std::shared_ptr<Context>& context, std::string name) {
  RpcOptions options;
  options.name = std::move(name);
  return RpcPeer::create(context, std::move(options));
}

// A peer whose machine is honest, and whose frames and answers are not.
class Rogue final : private transport::Handler {
 public:
  // Changes a message on its way out.
  using Twist = std::function<void(wire::MessageHead& head, std::vector<Buffer>& payload)>;

  explicit Rogue(const Uid& host_key)
      : environment_{loop_, allocator_, *this, {}, host_key},
        node_(config(host_key), allocator_, authenticator_) {
    environment_.lending = pool_.get();
    transport_.emplace(environment_);
  }
  ~Rogue() {
    const std::lock_guard lock(engine_);
    transport_->stop();
  }

  Twist twist;
  bool passes = true;  // segments are shown before they are lent

  void connect(const std::string& address) {
    const std::lock_guard lock(engine_);
    node_.connect(io::now(), address);
    carry_out();
  }
  void call(const std::string& function) {
    const std::lock_guard lock(engine_);
    node_.call(io::now(), "victim", function, lent_payload(*pool_), seconds(20), 1);
    carry_out();
  }
  bool until(const std::function<bool()>& condition) {
    const Time deadline = io::now() + kTimeout;
    std::unique_lock lock(engine_);
    while (!condition()) {
      if (io::now() > deadline) return false;
      loop_.turn(lock, io::now() + milliseconds(5));
      node_.tick(io::now());
      carry_out();
    }
    return true;
  }

  int up = 0;
  int down = 0;

 private:
  static rpc::Config config(const Uid& host_key) {
    rpc::Config config;
    config.instance = Uid::from_entropy();
    config.name = "rogue";
    config.host_key = host_key;
    return config;
  }

  void opened(std::shared_ptr<transport::Connection> connection,
              const std::string& dialled) override {
    transport::Connection& opened = *connection;
    connections_[opened.id()] = std::move(connection);
    node_.opened(io::now(), opened.id(), opened.path(), opened.traits(), dialled);
    carry_out();
  }
  void closed(transport::Connection& connection, const Error& error, bool) override {
    connections_.erase(connection.id());
    node_.closed(io::now(), connection.id(), error);
    carry_out();
  }
  void dial_failed(const std::string& address, const Error& error) override {
    node_.dial_failed(io::now(), address, error);
    carry_out();
  }
  void received(transport::Connection& connection, wire::ReceivedFrame frame) override {
    node_.received(io::now(), connection.id(), frame);
    carry_out();
  }
  std::span<std::byte> chunk_target(transport::Connection& connection,
                                    const wire::ChunkHead& head) override {
    return node_.chunk_target(connection.id(), head);
  }
  void chunk_received(transport::Connection& connection, const wire::ChunkHead& head) override {
    node_.event(&session::Session::chunk_received, io::now(), connection.id(), head);
    carry_out();
  }
  void writable(transport::Connection& connection) override {
    node_.event(&session::Session::writable, io::now(), connection.id());
    carry_out();
  }

  void carry_out() {
    std::vector<rpc::Action> actions;
    for (node_.drain(actions); !actions.empty(); node_.drain(actions)) {
      for (rpc::Action& action : actions) {
        std::visit([this](auto& which) { perform(which); }, action);
      }
    }
    for (const auto& [id, connection] : connections_) connection->flush();
  }
  transport::Connection* find(wire::ConnectionId id) {
    const auto found = connections_.find(id);
    return found == connections_.end() ? nullptr : found->second.get();
  }

  template <class Action>
  void perform(Action&) {}
  void perform(rpc::Dial& action) { transport_->dial(action.address); }
  void perform(rpc::Establish& action) {
    if (transport::Connection* connection = find(action.connection)) connection->establish();
  }
  void perform(rpc::CloseConnection& action) {
    if (transport::Connection* connection = find(action.connection)) connection->close();
    connections_.erase(action.connection);
  }
  void perform(rpc::PassSegments& action) {
    for (const std::uint64_t segment : action.segments) {
      if (passes) find(action.connection)->pass_segment(segment);
    }
    node_.event(&session::Session::segments_passed, io::now(), action.connection, action.seq, true);
  }
  void perform(rpc::PeerUp&) { ++up; }
  void perform(rpc::Undelivered&) {}
  void perform(rpc::PeerDown&) { ++down; }
  void perform(rpc::Write& action) {
    transport::Connection* connection = find(action.connection);
    if (connection == nullptr) return;
    wire::Frame& frame = action.frame;
    if (frame.header.type == wire::FrameType::message && twist) {
      auto head = wire::decode<wire::MessageHead>(frame.control.span());
      twist(head, frame.payload);
      const wire::FrameHeader header = frame.header;
      frame = wire::make_frame(header.type, head, std::move(frame.payload));
      frame.header.flags = header.flags;
      frame.header.lane = header.lane;
      frame.header.seq = header.seq;
      frame.header.ack = header.ack;
    }
    connection->write(std::move(frame));
  }

  std::mutex engine_;
  io::Loop loop_;
  HeapAllocator allocator_;
  std::shared_ptr<memory::LendingPool> pool_ = std::make_shared<memory::LendingPool>();
  rpc::Authenticator authenticator_;
  transport::Environment environment_;
  rpc::Node node_;
  std::optional<transport::shm::ShmTransport> transport_;
  std::map<wire::ConnectionId, std::shared_ptr<transport::Connection>> connections_;
};

// Its function must not run for a loan that lies; it serves others all the same.
struct Victim {
  Victim() : peer(make_peer(context, "victim")) {
    peer->define("take", [this](const Incoming& call) {
      const Buffer& part = call.arguments.parts.at(0);
      CHECK(part.size() == kBytes && part.data()[kBytes - 1] == std::byte{7});
      ++runs;
      call.responder->send(empty_payload());
    });
    address = peer->listen("shm://").at(0);
  }
  ~Victim() {
    peer->close();
    context->stop();
  }
  void serves_others() {
    const auto other = Context::create({});
    const auto honest = make_peer(other, "honest");
    honest->connect(address);
    const auto future = honest->call("victim", "take", lent_payload(other->lending()), kTimeout, 1);
    CHECK(future->wait(io::now() + kTimeout, {}));
    CHECK(std::holds_alternative<wire::Payload>(future->outcome()));
    honest->close();
    other->stop();
  }

  std::shared_ptr<Context> context = Context::create({});
  std::shared_ptr<RpcPeer> peer;
  std::string address;
  std::atomic<int> runs{0};
};

void is_cut_off(const char* what, const Rogue::Twist& twist, bool passes = true) {
  Victim victim;
  Rogue rogue(victim.context->host_key());
  rogue.connect(victim.address);
  if (!rogue.until([&] { return rogue.up == 1; })) check::fail(__FILE__, __LINE__, what);
  rogue.twist = twist;
  rogue.passes = passes;
  rogue.call("take");
  if (!rogue.until([&] { return rogue.down == 1; })) check::fail(__FILE__, __LINE__, what);
  if (victim.runs != 0) check::fail(__FILE__, __LINE__, what);
  victim.serves_others();
}

// The message is the call: the body's part, and the one that is lent.
Rogue::Twist place(const std::function<void(wire::LentPart&, wire::PartHead&)>& change) {
  return [change](wire::MessageHead& head, std::vector<Buffer>&) {
    if (!head.lent.empty()) change(head.lent.at(0), head.parts.at(1));
  };
}

TEST("lending: a rogue is served as long as it is honest") {
  Victim victim;
  Rogue rogue(victim.context->host_key());
  rogue.connect(victim.address);
  CHECK(rogue.until([&] { return rogue.up == 1; }));
  rogue.call("take");
  CHECK(rogue.until([&] { return victim.runs == 1; }));
}

TEST("lending: whoever lies about a loan is cut off, and nobody else") {
  is_cut_off("a segment that was not passed", {}, false);
  is_cut_off("another segment", place([](auto& lent, auto&) { lent.segment = 99; }));
  is_cut_off("an offset outside", place([](auto& lent, auto&) { lent.offset = 1u << 30; }));
  is_cut_off("an offset at the end", place([](auto& lent, auto&) {
               lent.offset = memory::LendingPool::kSegmentBytes - kBytes + 1;
             }));
  is_cut_off("an offset that wraps",
             place([](auto& lent, auto&) { lent.offset = ~std::uint64_t{0} - 100; }));
  is_cut_off("more bytes than there are",
             place([](auto&, auto& part) { part.bytes = std::uint64_t{1} << 32; }));
  is_cut_off("no number", place([](auto&, auto& part) { part.id = 0; }));
  is_cut_off("a part that is none", place([](auto& lent, auto&) { lent.part = 2; }));
}

TEST("lending: whoever returns what it was not lent is cut off") {
  is_cut_off("a return", [](wire::MessageHead& head, std::vector<Buffer>& payload) {
    const Buffer body = wire::encode(wire::Return{{1, 2, 3}});
    head = {};
    head.kind = session::kReturnKind;
    head.body.bytes = body.size();
    payload = {body};
  });
}

TEST("lending: the memory is mapped, and comes back when the borrower lets go") {
  Victim victim;
  std::atomic<const std::byte*> kept_data{nullptr};
  wire::Payload kept;
  std::latch held(1);
  victim.peer->define("keep", [&](const Incoming& call) {
    kept = call.arguments;
    kept_data = kept.parts.at(0).data();
    call.responder->send(empty_payload());
    held.count_down();
  });
  const auto context = Context::create({});
  const auto lender = make_peer(context, "lender");
  lender->connect(victim.address);
  wire::Payload payload = lent_payload(context->lending());
  auto* data = const_cast<std::byte*>(payload.parts.at(0).data());
  const auto released = std::make_shared<Future>(context);
  struct Owner {
    std::shared_ptr<const void> release;
    Buffer bytes;
  };
  auto owner = std::make_shared<Owner>(Owner{on_release(context, released, {}), payload.parts[0]});
  payload.parts[0] = Buffer(std::move(owner), data, kBytes);
  const auto future = lender->call("victim", "keep", std::move(payload), kTimeout, 1);
  CHECK(future->wait(io::now() + kTimeout, {}));
  held.wait();
  CHECK(kept_data != data);
  data[5] = std::byte{99};
  CHECK(kept_data.load()[5] == std::byte{99});
  CHECK(!released->done());
  std::thread([&] { kept = {}; }).join();  // on any thread
  CHECK(released->wait(io::now() + kTimeout, {}));
  lender->close();
  context->stop();
}

}  // namespace lending_test
}  // namespace moolink::runtime
