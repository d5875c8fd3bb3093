// Strangers at a peer that asks for proofs which they do not have. Whatever they send, none of it
// becomes a peer, a call or a message, and what the peer holds of them ends with their connections.

#include <map>

#include "rpc/node.h"
#include "target.h"
#include "wire/frame.h"

namespace moolink::fuzz {
namespace {

crypto::Key key_of(int byte) {
  crypto::Key key;
  key.secret.fill(static_cast<std::byte>(byte));
  return key;
}

wire::ReceivedFrame frame_of(Input& input) {
  wire::ReceivedFrame frame;
  frame.header.type = static_cast<wire::FrameType>(
      1 + input.below(static_cast<std::size_t>(enum_max(wire::FrameType{}))));
  frame.header.seq = input.number();
  frame.header.ack = input.number();
  Bytes bytes = input.bytes();
  const std::size_t control = input.chance() ? input.number() : bytes.size();
  frame.header.length = static_cast<std::uint32_t>(bytes.size());
  frame.header.control = static_cast<std::uint32_t>(std::min(control, bytes.size()));
  frame.bytes = as_buffer(std::move(bytes));
  return frame;
}

bool may_happen(const rpc::Action& action) {
  return std::holds_alternative<rpc::Write>(action) || std::holds_alternative<rpc::Log>(action) ||
         std::holds_alternative<rpc::Dial>(action) ||
         std::holds_alternative<rpc::Refused>(action) ||
         std::holds_alternative<rpc::CloseConnection>(action);
}

}  // namespace

void run(Input input) {
  static const rpc::Authenticator authenticator(crypto::Keyring({key_of(1)}), "a test",
                                                key_of(2).secret);
  CountingAllocator allocator(0);  // a stranger has nothing allocated for it here
  rpc::Config config;
  config.instance = {1, 1};
  config.name = "victim";
  rpc::Node node(config, allocator, authenticator);
  node.define("secret");
  Time now(seconds(10));
  std::map<wire::ConnectionId, bool> open;
  wire::ConnectionId last = 0;
  std::vector<rpc::Action> actions;
  const auto carry_out = [&] {
    node.drain(actions);
    for (const rpc::Action& action : actions) {
      FUZZ_CHECK(may_happen(action));
      if (const auto* close = std::get_if<rpc::CloseConnection>(&action)) {
        open.erase(close->connection);
      }
    }
  };
  while (!input.empty()) {
    const std::size_t what = input.below(8);
    const wire::ConnectionId at = last - input.below(4);
    if (what == 0 || last == 0) {
      const bool dialled = input.chance();
      open[++last] = true;
      if (dialled) node.connect(now, "tcp://10.0.0.1:1");
      node.opened(now, last, input.chance() ? wire::PathKind::tcp : wire::PathKind::shm, {},
                  dialled ? "tcp://10.0.0.1:1" : "");
    } else if (what == 1) {
      now += milliseconds(input.byte());
      node.tick(now);
    } else if (what == 2 && open.erase(at) == 1) {
      node.closed(now, at, make_error(ErrorCode::peer_lost, "gone"));
    } else if (open.contains(at)) {
      const wire::ReceivedFrame frame = frame_of(input);
      if (frame.header.type != wire::FrameType::chunk) node.received(now, at, frame);
    }
    carry_out();
    FUZZ_CHECK(node.peers(now).empty());
  }
}

std::vector<Bytes> seeds() {
  wire::Hello hello;
  hello.instance = {2, 2};
  hello.name = "stranger";
  hello.keys = {key_of(3).identity()};
  hello.session = 5;
  hello.rx_have = {6};
  hello.max_frame = 1 << 20;
  hello.proof = std::vector<std::byte>(32);
  hello.addresses = {"tcp://10.0.0.2:1"};
  const auto send = [](Output& output, wire::FrameType type, const Buffer& control) {
    output.byte(7).byte(0).byte(static_cast<std::uint64_t>(type) - 1).number(0).number(0);
    output.bytes(control.span()).byte(0);
  };
  Output accepted;
  accepted.byte(0).byte(0).byte(0).byte(1);
  send(accepted, wire::FrameType::hello, wire::encode(hello));
  send(accepted, wire::FrameType::welcome, wire::encode(hello));
  Output dialled;
  dialled.byte(0).byte(0).byte(1).byte(1);
  send(dialled, wire::FrameType::hello, wire::encode(hello));
  send(dialled, wire::FrameType::welcome, wire::encode(hello));
  dialled.byte(0).byte(0).byte(1).byte(1);
  send(dialled, wire::FrameType::refuse, wire::encode(wire::Refuse{ErrorCode::auth, "no", "x"}));
  dialled.byte(1).byte(0).byte(200);
  Output impatient;
  impatient.byte(0).byte(0).byte(0).byte(0);
  send(impatient, wire::FrameType::hello, wire::encode(hello));
  send(impatient, wire::FrameType::message, wire::encode(wire::MessageHead{}));
  impatient.byte(2).byte(0);
  return {accepted.take(), dialled.take(), impatient.take()};
}

}  // namespace moolink::fuzz
