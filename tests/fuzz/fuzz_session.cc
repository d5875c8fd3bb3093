// A peer that has proven who it is, and then sends frames of any kind with anything in them. No
// error leaves the node, and what it holds of the peer stays within the limits.

#include <deque>
#include <map>
#include <set>

#include "rpc/messages.h"
#include "rpc/node.h"
#include "target.h"
#include "wire/frame.h"

namespace moolink::fuzz {
namespace {

constexpr std::size_t kWindow = std::size_t{256} << 10;
constexpr std::size_t kLargest = std::size_t{1} << 20;  // message
constexpr std::size_t kMostCalls = 32;

wire::ReceivedFrame as_received(const wire::Frame& frame) {
  Bytes bytes(frame.control.span().begin(), frame.control.span().end());
  for (const Buffer& piece : frame.payload) {
    bytes.insert(bytes.end(), piece.span().begin(), piece.span().end());
  }
  return {frame.header, as_buffer(std::move(bytes))};
}

rpc::Config config(std::uint64_t number, const std::string& name) {
  rpc::Config config;
  config.instance = {number, number};
  config.name = name;
  config.limits.send_window_bytes = kWindow;
  config.limits.send_window_messages = 64;
  config.limits.max_message = config.limits.max_part = kLargest;
  config.limits.max_body = kLargest;
  config.max_running_calls = kMostCalls;
  return config;
}

class Victim {
 public:
  explicit Victim(bool shared_memory)
      : kind_(shared_memory ? wire::PathKind::shm : wire::PathKind::tcp),
        node_(config(1, "victim"), allocator_, authenticator_),
        friend_(config(2, "peer"), allocator_, authenticator_) {
    traits_.grants = traits_.standing_grants = traits_.loans = shared_memory;
    node_.define("echo");
    connect();
  }

  void act(Input& input) {
    switch (input.below(16)) {
      case 0:
        now_ += milliseconds(input.byte());
        node_.tick(now_);
        break;
      case 1:
        answer();
        break;
      case 2:
        node_.call(now_, "peer", "any", {as_buffer(Bytes(input.byte() * 200U)), {}}, seconds(1),
                   static_cast<std::uint16_t>(input.below(3)));
        break;
      case 3:
        calls_.push_back(node_.call(now_, "peer", "any", {as_buffer(Bytes(3)), {}}, seconds(1), 0,
                                    1 + input.below(9)));
        break;
      case 4:
        if (!calls_.empty()) node_.raise_credit(now_, calls_.front(), 1 + input.byte());
        break;
      case 5:
        if (input.byte() == 0) connect();
        break;
      case 6:
        chunk(input);
        break;
      case 7:
        fill();
        break;
      default:
        frame(input);
    }
    carry_out();
    check();
  }

 private:
  void connect() {
    if (connected_) node_.closed(now_, connection_, make_error(ErrorCode::peer_lost, "gone"));
    carry_out();
    friend_.set_paths({kind_});
    connected_ = true;
    ++connection_;
    node_.opened(now_, connection_, kind_, traits_, "");
    friend_.connect(now_, "tcp://10.0.0.1:1");
    friend_.opened(now_, connection_, kind_, traits_, "tcp://10.0.0.1:1");
    // The friend greets, and is silent then: its frames are the fuzzer's.
    greeting_ = true;
    for (int turn = 0; turn < 6; ++turn) {
      std::vector<rpc::Action> actions;
      friend_.drain(actions);
      for (const rpc::Action& action : actions) {
        const auto* write = std::get_if<rpc::Write>(&action);
        if (write != nullptr && write->connection == connection_) {
          node_.received(now_, connection_, as_received(write->frame));
        }
      }
      carry_out();
    }
    greeting_ = false;
    friend_.closed(now_, connection_, make_error(ErrorCode::peer_lost, "gone"));
    FUZZ_CHECK(connection_ > 1 || node_.peers(now_).size() == 1);
  }

  void frame(Input& input) {
    if (!connected_) return;
    wire::ReceivedFrame frame;
    frame.header.type = static_cast<wire::FrameType>(
        1 + input.below(static_cast<std::size_t>(enum_max(wire::FrameType{}))));
    if (frame.header.type == wire::FrameType::chunk) return;
    frame.header.lane = input.byte();
    frame.header.seq = input.number();
    frame.header.ack = input.number();
    Bytes bytes = input.bytes();
    const Bytes payload = input.bytes();
    frame.header.control = static_cast<std::uint32_t>(bytes.size());
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    frame.header.length = static_cast<std::uint32_t>(bytes.size());
    frame.bytes = as_buffer(std::move(bytes));
    node_.received(now_, connection_, frame);
  }

  void chunk(Input& input) {
    const wire::ChunkHead head{input.number(), static_cast<std::uint32_t>(input.number()),
                               static_cast<std::uint32_t>(input.number()), input.number(),
                               input.number() * 64};
    if (!connected_ || head.bytes > kLargest) return;  // the transport's limit
    const std::span<std::byte> target = node_.chunk_target(connection_, head);
    FUZZ_CHECK(target.empty() || target.size() == head.bytes);
    if (!target.empty()) std::memset(target.data(), 1, target.size());
    if (!target.empty() || input.chance())
      node_.event(&session::Session::chunk_received, now_, connection_, head);
  }

  void answer() {
    if (running_.empty()) return;
    const rpc::CallKey key = running_.front();
    running_.pop_front();
    node_.reply(now_, key, wire::Payload{as_buffer(Bytes(10)), {}});
  }

  void fill() {
    if (filling_.empty()) return;
    node_.event(&session::Session::grant_filled, now_, connection_, filling_.front());
    filling_.pop_front();
  }

  void carry_out() {
    std::vector<rpc::Action> actions;
    for (node_.drain(actions); !actions.empty(); node_.drain(actions)) {
      for (rpc::Action& action : actions) carry_out(action);
    }
  }

  void carry_out(rpc::Action& action) {
    if (const auto* write = std::get_if<rpc::Write>(&action)) {
      if (greeting_ && write->connection == connection_) {
        friend_.received(now_, connection_, as_received(write->frame));
      }
    } else if (const auto* close = std::get_if<rpc::CloseConnection>(&action)) {
      connected_ = connected_ && close->connection != connection_;
      filling_.clear();
    } else if (auto* run = std::get_if<rpc::RunHandler>(&action)) {
      FUZZ_CHECK(run->function == "echo" && run->caller == "peer");
      running_.push_back(run->key);
    } else if (const auto* cancelled = std::get_if<rpc::CancelHandler>(&action)) {
      std::erase(running_, cancelled->key);
    } else if (const auto* allocate = std::get_if<rpc::AllocateGrant>(&action)) {
      grant(*allocate);
    } else if (const auto* fill = std::get_if<rpc::FillGrant>(&action)) {
      filling_.push_back(fill->place.grant);
    } else if (const auto* map = std::get_if<rpc::MapLoan>(&action)) {
      const bool exists = map->place.segment == 1 && map->place.bytes <= kLargest;
      node_.event(&session::Session::loan_mapped, now_, map->connection, map->seq, map->part,
                  exists ? as_buffer(Bytes(static_cast<std::size_t>(map->place.bytes))) : Buffer(),
                  exists ? Error{} : make_error(ErrorCode::wire, "no such segment"));
    } else if (const auto* pass = std::get_if<rpc::PassSegments>(&action)) {
      node_.event(&session::Session::segments_passed, now_, pass->connection, pass->seq, true);
    } else if (const auto* complete = std::get_if<rpc::Complete>(&action)) {
      std::erase(calls_, complete->id);
    }
  }

  void grant(const rpc::AllocateGrant& wanted) {
    MutableBuffer memory;
    if (wanted.bytes <= kLargest) {
      memory = allocator_.allocate(static_cast<std::size_t>(wanted.bytes));
    }
    const wire::GrantPlace place{++grants_, 1, 0, wanted.bytes};
    node_.event(&session::Session::grant_ready, now_, wanted.connection, wanted.seq, wanted.part,
                place, memory);
  }

  void check() {
    // Two windows of messages under way, small and large, and a message beyond each; the grants
    // that stand; what the calls hold that run.
    FUZZ_CHECK(allocator_.held() <= 4 * kWindow + 2 * kLargest + (std::size_t{16} << 20));
    std::size_t running = 0;
    for (const rpc::PeerInfo& peer : node_.peers(now_)) running += peer.calls_running;
    FUZZ_CHECK(running <= 4 * kMostCalls + 2 * 64);
  }

  wire::PathKind kind_;
  wire::PathTraits traits_;
  rpc::Authenticator authenticator_;
  CountingAllocator allocator_{2 * kLargest};
  rpc::Node node_;
  rpc::Node friend_;
  Time now_{seconds(10)};
  bool connected_ = false;
  bool greeting_ = false;
  wire::ConnectionId connection_ = 0;
  std::uint64_t grants_ = 0;
  std::deque<rpc::CallKey> running_;
  std::deque<std::uint64_t> filling_;
  std::deque<rpc::CallId> calls_;
};

void send(Output& output, wire::FrameType type, std::uint64_t seq, const Buffer& control,
          std::span<const std::byte> payload) {
  output.byte(8).byte(static_cast<std::uint64_t>(type) - 1).byte(0).number(seq).number(0);
  output.bytes(control.span()).bytes(payload);
}

// A call of "echo" with one more part, which is where it says.
void call(Output& output, std::uint64_t seq, wire::PartHead part) {
  const Buffer body = wire::encode(rpc::CallHead{seq, "echo", 0});
  wire::MessageHead head;
  head.kind = 1;
  head.attempt = 1;
  head.body.bytes = body.size();
  head.parts = {{4, 64, wire::PartWhere::inline_, 0}, part};
  if (part.where == wire::PartWhere::loan) head.lent = {{1, 1, 0}};
  Bytes payload(body.span().begin(), body.span().end());
  payload.resize(payload.size() + 4);
  if (part.where == wire::PartWhere::inline_) payload.resize(payload.size() + part.bytes);
  send(output, wire::FrameType::message, seq, wire::encode(head), payload);
}

}  // namespace

void run(Input input) {
  Victim victim(input.chance());
  for (int steps = 0; steps < 500 && !input.empty(); ++steps) victim.act(input);
}

std::vector<Bytes> seeds() {
  using wire::FrameType;
  using wire::PartWhere;
  Output tcp;
  tcp.byte(0);
  call(tcp, 1, {8, 64, PartWhere::inline_, 0});
  call(tcp, 2, {128, 64, PartWhere::stream, 0});
  tcp.byte(6).number(2).number(1).number(1).number(0).number(1).byte(0);
  tcp.byte(6).number(2).number(1).number(1).number(64).number(1).byte(0);
  send(tcp, FrameType::ping, 0, wire::encode(wire::Ping{4}), {});
  send(tcp, FrameType::window, 1, wire::encode(wire::Window{0, 0}), {});
  tcp.byte(1).byte(2).byte(9).byte(0).byte(3).byte(4).byte(2).byte(0).byte(100);
  send(tcp, FrameType::ack, 0, wire::encode(wire::Ack{1, {1}}), {});
  Output shm;
  shm.byte(1);
  call(shm, 1, {100000, 64, PartWhere::grant, 0});
  send(shm, FrameType::want, 0, wire::encode(wire::Want{1, 1, 100000}), {});
  send(shm, FrameType::done, 0, wire::encode(wire::Done{1}), {});
  call(shm, 2, {5000, 64, PartWhere::loan, 7});
  shm.byte(1).byte(1).byte(2).byte(250);
  send(shm, FrameType::grant, 0, wire::encode(wire::Grant{4, 1, 1, 50000, 1, 0}), {});
  shm.byte(7);
  send(shm, FrameType::close, 0, wire::encode(wire::Close{}), {});
  shm.byte(5).byte(0);
  call(shm, 1, {8, 64, PartWhere::inline_, 0});
  return {tcp.take(), shm.take()};
}

}  // namespace moolink::fuzz
