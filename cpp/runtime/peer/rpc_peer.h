#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/limits.h"
#include "crypto/keyring.h"
#include "rpc/node.h"
#include "rpc/policy.h"
#include "runtime/engine/action_pump.h"
#include "runtime/engine/context.h"
#include "runtime/engine/future.h"
#include "runtime/engine/stream.h"
#include "runtime/peer/descriptor_exchange.h"
#include "runtime/peer/loans.h"
#include "runtime/peer/paths.h"
#include "runtime/peer/recipient.h"
#include "runtime/peer/responder.h"
#include "runtime/peer/service_router.h"
#include "transport/transport.h"

namespace moolink::runtime {

struct RpcOptions {
  std::string name;                                       // empty: the instance id
  std::optional<std::vector<wire::PathKind>> transports;  // none: default_paths()
  Limits limits;
  session::Timing timing;
  crypto::Keyring keyring;  // the keys that it shows and accepts; empty: insecure
  std::string key_origin;   // where the keys are from, for the user
};

// Statistics of one kind of path.
struct PathStats {
  std::uint64_t frames_written = 0;
  std::uint64_t frames_received = 0;
  std::uint64_t bytes_written = 0;  // payload and control
  std::uint64_t bytes_received = 0;
};

struct RpcStats {
  std::uint64_t calls_sent = 0;
  std::uint64_t calls_succeeded = 0;
  std::uint64_t calls_failed = 0;
  std::uint64_t calls_received = 0;
  std::uint64_t calls_running = 0;                // received, their handlers not yet returned
  std::uint64_t calls_pending = 0;                // sent, and without a result yet
  std::array<PathStats, wire::kPathKinds> paths;  // by kind
  std::uint64_t connections = 0;                  // open now
  std::uint64_t connections_opened = 0;
  std::uint64_t dials_failed = 0;
  std::uint64_t peers = 0;       // known now
  std::uint64_t peers_lost = 0;  // dead, unreachable or closed
};

// Told when peers come and go; called with the engine's lock held.
class PeerObserver {
 public:
  virtual ~PeerObserver() = default;
  virtual void peer_up(const rpc::PeerUp& /*peer*/) {}
  virtual void peer_down(const rpc::PeerDown& /*peer*/) {}
  // Service messages sent to the instance while it was not up have been dropped.
  virtual void undelivered(const Uid& /*instance*/) {}
  // Memory that the instance lent through the connection can be read while the object is held.
  virtual void connection_ended(const Uid& /*instance*/,
                                const std::shared_ptr<transport::Connection>& /*connection*/) {}
  // At an address that this peer dials, a peer has another key.
  virtual void refused(const rpc::Refused& /*refusal*/) {}
  // The exception barrier: one of these calls, or a service message, failed.
  virtual void failed(const Error& /*error*/) {}
  // close() was called: pending work fails, a farewell may still be sent. May remove itself.
  virtual void closing() {}
  // Nothing that others need is in transit from it; close() waits briefly for that.
  virtual bool has_delivered() const { return true; }
};

// One peer: carries out the actions of its Node on transports, futures and workers.
class RpcPeer final : public std::enable_shared_from_this<RpcPeer>,
                      public Driven,
                      public Forkable,
                      private transport::Handler {
 public:
  static std::shared_ptr<RpcPeer> create(std::shared_ptr<Context> context, RpcOptions options);
  ~RpcPeer() override;

  const std::shared_ptr<Context>& context() const { return context_; }
  const Uid& instance() const { return node_.instance(); }

  // --- from any thread, without the lock
  std::string name();
  void set_name(const std::string& name);
  void set_transports(const std::vector<wire::PathKind>& transports);
  // Returns every address at which this peer can now be dialled through the new listener.
  // advertise: "host" or "host:port" to announce instead of the bound addresses.
  std::vector<std::string> listen(const std::string& address, const std::string& advertise = {});
  void connect(const std::string& address);

  std::shared_ptr<Future> call(const std::string& peer, const std::string& function,
                               wire::Payload arguments, Duration timeout, std::uint16_t lane) {
    const Engine::Lock lock = lock_open();
    return start_call(peer, function, std::move(arguments), timeout, lane);
  }
  // The same unless it would have to wait for the engine's lock, or this peer is closed: then it
  // returns nullptr and leaves `arguments` unchanged.
  std::shared_ptr<Future> call_at_once(const std::string& peer, const std::string& function,
                                       wire::Payload& arguments, Duration timeout,
                                       std::uint16_t lane) {
    const Engine::Lock lock = context_->try_lock();
    if (!lock.owns_lock() || closing_) return nullptr;
    return start_call(peer, function, std::move(arguments), timeout, lane);
  }
  // A call whose handler sends items before its reply; at most `credit` of them (above 0) wait to
  // be taken. `timeout`: of each item.
  std::shared_ptr<Stream> stream(const std::string& peer, const std::string& function,
                                 wire::Payload arguments, Duration timeout, std::uint16_t lane,
                                 std::uint64_t credit);
  // Memory of the message's receiver, if it has granted some. Released when unused.
  std::optional<PlacedMemory> place(const rpc::Receiver& receiver, std::size_t bytes);
  // Whether parts of a message to it may be in this CUDA device's memory.
  bool reads_device(const rpc::Receiver& receiver, int device);
  // Throws Exception{invalid_argument} if the name is taken.
  // Peers whose key is that of another group than `group` (empty: any) cannot call it.
  void define(const std::string& function, CallHandler handler, const std::string& group = {});
  // Waits until no call of it runs, unless the handler itself calls this; false: not defined.
  bool undefine(const std::string& function, const Engine::Interrupt& interrupt);

  // Waits a moment for running handlers, flushes replies, says goodbye, fails pending calls.
  void close();
  bool closed() const { return closing_; }

  RpcStats stats();
  std::vector<rpc::PeerInfo> peers();
  std::vector<std::string> addresses();
  // rpc_peer_describe.cc
  rpc::Explanation explain(const std::string& peer);
  // The last events of this peer, oldest first, a line each.
  std::vector<std::string> flight_recorder();

  // --- with the engine's lock held: for machines beside the Node (groups, accumulators)
  const rpc::Node& node() const { return node_; }
  // Sends a group's message to an instance; dials it by its name if there is no session with it
  // yet. Sends nothing to a peer whose key is that of another group.
  void send_service_to(const Uid& instance, const std::string& peer, rpc::Service service,
                       wire::Payload payload, const std::string& group = {});
  void send_service_to_name(const std::string& peer, rpc::Service service, wire::Payload payload,
                            const std::string& group = {});
  // An action from or for that peer failed: the session ends at both ends, for that reason, and
  // groups continue in another epoch.
  void fail_peer(const Uid& instance, const Error& error);
  [[nodiscard]] Listed<PeerObserver> add(PeerObserver& observer) { return {observers_, observer}; }
  // Passes descriptors to a peer of this host, where descriptors() takes them; false: there is no
  // connection through shared memory now.
  bool share(const Uid& instance, const Uid& key, std::span<const int> descriptors);
  DescriptorExchange& descriptors() { return descriptors_; }
  // Whether the instance has mapped this segment of the lending pool, on the connection in use. If
  // not, passes the segment; without a connection, makes the peers connect, as a message of the
  // group would.
  bool lends(const Uid& instance, const std::string& peer, std::uint64_t segment,
             const std::string& group);
  // The bytes of a segment that the instance lends. Null: it is not mapped, or its connection has
  // ended.
  LentBytes lent_by(const Uid& instance, std::uint64_t segment);
  // For a second at most. Releases the lock meanwhile.
  void wait_until_delivered(Engine::Lock& lock, const std::function<bool()>& delivered);
  ServiceRouter& router() { return router_; }
  // Ends a step of a machine beside the Node from outside the loop: writes out its messages, and
  // makes the loop check the clock again. `deadline` is that machine's own.
  void settle(Time deadline = kNever);
  // Tells the lenders of loans that have ended here.
  void return_loans();
  // Releases an unused standing grant.
  void release(wire::ConnectionId connection, std::uint64_t grant);

  // Driven, Forkable
  void tick(Time now) override;
  Time next_deadline() const override { return node_.next_deadline(); }
  void flush() override;
  void describe(Time now, Describe how, std::string& text) const override;
  void abandon() noexcept override;

 private:
  friend class Responder;

  struct Function {
    CallHandler handler;
    std::size_t running = 0;       // calls not yet returned, queued ones too
    std::vector<Waiter*> drained;  // undefine() waits here
  };
  // A call with a handler here: until the handler has returned, and has replied or must not any
  // more.
  struct Handling {
    std::weak_ptr<Responder> responder;
    std::string caller;
    Time arrived{};
    bool replied = false;
    bool unwanted = false;
    bool returned = false;
  };
  // A call of this side without a result yet.
  struct Pending {
    std::shared_ptr<Awaitable> outcome;
    Stream* items = nullptr;  // the same, if it is a stream
  };
  using HandlingOf = std::map<rpc::CallKey, Handling>;
  using Connections =
      std::unordered_map<wire::ConnectionId, std::shared_ptr<transport::Connection>>;

  RpcPeer(std::shared_ptr<Context> context, RpcOptions options);

  // rpc_peer_network.cc: events of transports, actions of the Node
  void opened(std::shared_ptr<transport::Connection> connection,
              const std::string& dialled_address) override;
  void closed(transport::Connection& connection, const Error& error, bool peer_dead) override;
  void dial_failed(const std::string& address, const Error& error) override;
  void turned_away(const Error& error) override;
  void cannot_accept(const Error& error) override;
  void received(transport::Connection& connection, wire::ReceivedFrame frame) override;
  std::span<std::byte> chunk_target(transport::Connection& connection,
                                    const wire::ChunkHead& head) override;
  void chunk_received(transport::Connection& connection, const wire::ChunkHead& head) override;
  void writable(transport::Connection& connection) override;
  void grant_filled(transport::Connection& connection, const wire::GrantPlace& place) override;
  void shared(transport::Connection&, const Uid& key,
              std::vector<Descriptor> descriptors) override {
    descriptors_.arrived(key, std::move(descriptors));
  }

  void ask_for_more();
  void perform(rpc::Write& action);
  void perform(rpc::RunHandler& action);
  void perform(rpc::Complete& action);
  void perform(rpc::StreamItem& action);
  void perform(rpc::CreditRaised& action);
  void perform(rpc::ServiceMessage& action);
  void perform(rpc::CancelHandler& action);
  void perform(rpc::Dial& action);
  void perform(rpc::Establish& action) {
    if (transport::Connection* connection = find(action.connection)) connection->establish();
  }
  void perform(rpc::CloseConnection& action);
  void perform(rpc::AllocateGrant& action);
  void perform(rpc::FillGrant& action);
  void refuse_path(wire::ConnectionId id, const Error& error);
  bool can_bring_to_host(wire::ConnectionId connection, std::span<Buffer> parts);
  void perform(rpc::PassSegments& action);
  void perform(rpc::MapLoan& action);
  void perform(rpc::PeerUp& action);
  void perform(rpc::PeerDown& action);
  void perform(rpc::Undelivered& action);
  void perform(rpc::Refused& action);
  void perform(rpc::Log& action) { context_->log(action.level, std::move(action.text)); }
  void perform(rpc::Closed&) {
    if (node_closed_ != nullptr) context_->engine().finish(*node_closed_);
  }
  // rpc_peer_ends.cc: carries out the actions; ends the operation of one that failed.
  void carry_out();
  void end(const rpc::RunHandler& action, const Error& error);
  void end(const rpc::StreamItem& action, const Error& error);
  void end(const rpc::CreditRaised& action, const Error& error) {
    node_.reply(io::now(), action.key, error);
  }
  // It is not sent again; the machines it is for handle lost sessions.
  void end(const rpc::ServiceMessage& action, const Error& error) {
    node_.fail_peer(io::now(), action.from, error);
  }
  void end(const rpc::Dial& action, const Error& error) {
    node_.dial_failed(io::now(), action.address, error);
  }
  template <class Tell>
  void tell_observers(const Tell& tell);
  void record(FlightKind kind, std::string_view peer, std::uint64_t id, std::string_view text) {
    context_->recorder().record(now_, kind, node_.name(), peer, id, text);
  }
  void record_frame(FlightKind kind, wire::ConnectionId connection, wire::FrameType type);
  transport::Connection* find(wire::ConnectionId id);
  transport::Connection* in_use(const rpc::Receiver& receiver);
  std::shared_ptr<transport::Connection> forget(wire::ConnectionId id, const Uid& instance);
  transport::Transport& transport_for(const std::string& address);
  void listen_beside(const transport::Connection& connection);
  void listen_unasked(const std::string& address);
  void listen_for_rdma(const std::vector<std::string>& bound);

  // rpc_peer_describe.cc
  void describe_peers(Time now, std::string& text) const;
  void describe_calls(Time now, std::size_t most, const std::string& indent,
                      std::string& text) const;
  void describe_handlers(Time now, std::size_t most, const std::string& indent,
                         std::string& text) const;

  // rpc_peer.cc
  Time clock() { return now_ = io::now(); }
  void forget_if_over(HandlingOf::iterator handling);
  Engine::Lock lock_open();
  std::shared_ptr<Future> start_call(const std::string& peer, const std::string& function,
                                     wire::Payload arguments, Duration timeout, std::uint16_t lane);
  void follow(rpc::CallId id, const std::string& peer, const std::string& function,
              Pending pending);
  // Whether this thread runs a handler of this peer.
  bool runs_handler_here() const;
  template <class Begin>
  void await(Engine::Lock& lock, Waiter*& waiter, const char* what, Duration within,
             const Begin& begin);
  void fail_pending();
  void operation_done();
  void call_done();
  void start();
  std::vector<std::unique_ptr<transport::Transport>> make_transports(EnabledPaths& paths);
  void reply(const rpc::CallKey& key, rpc::Reply reply);
  void send_item(const rpc::CallKey& key, wire::Payload item);
  void run(const std::shared_ptr<Function>& function, Incoming incoming);

  std::shared_ptr<Context> context_;
  std::optional<std::vector<wire::PathKind>> chosen_;  // the transports that the user named
  const crypto::Keyring keyring_;
  const rpc::Policy policy_;
  transport::Environment environment_;
  rpc::Node node_;
  std::vector<std::unique_ptr<transport::Transport>> transports_;
  std::vector<std::string> addresses_;
  std::set<wire::PathKind> listens_;
  Connections connections_;
  std::vector<std::shared_ptr<transport::Connection>> dirty_;  // written to in this turn
  std::vector<wire::ConnectionId> fed_;  // chunks were written to since the Node was last asked
  std::vector<rpc::Action> actions_;
  ActionPump pump_;

  std::unordered_map<rpc::CallId, Pending> pending_;
  std::map<std::string, std::shared_ptr<Function>> functions_;
  HandlingOf running_;
  ServiceRouter router_{*this};
  DescriptorExchange descriptors_;
  std::shared_ptr<LoanReturns> returns_;
  std::vector<PeerObserver*> observers_;
  Listed<Driven> driven_;
  RpcStats stats_;
  Time now_{};  // of the event being handled
  std::atomic<bool> closing_{false};
  bool started_ = false;    // listens or connects: the transports exist
  bool finished_ = false;   // the Node has closed
  Waiter* idle_ = nullptr;  // close() waits until `idle_at_` handlers run
  std::uint64_t idle_at_ = 0;
  Waiter* node_closed_ = nullptr;  // close() waits for the Node
  bool told_refusal_ = false;      // the refusal of memory of CUDA devices was reported
};

}  // namespace moolink::runtime
