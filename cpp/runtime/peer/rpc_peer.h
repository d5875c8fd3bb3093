#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/thread_safety.h"
#include "rpc/authenticator.h"
#include "rpc/node.h"
#include "runtime/engine/action_pump.h"
#include "runtime/engine/context.h"
#include "runtime/engine/future.h"
#include "runtime/engine/stream.h"
#include "runtime/peer/descriptor_exchange.h"
#include "runtime/peer/functions.h"
#include "runtime/peer/loans.h"
#include "runtime/peer/open_connections.h"
#include "runtime/peer/peer_transports.h"
#include "runtime/peer/responder.h"
#include "runtime/peer/rpc_options.h"
#include "runtime/peer/sender.h"
#include "runtime/peer/service_router.h"
#include "transport/transport.h"

namespace moolink::runtime {

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

// Told when peers come and go.
class PeerObserver {
 public:
  virtual ~PeerObserver() = default;
  virtual void peer_up(const rpc::PeerUp& /*peer*/) MOOLINK_LOCKED {}
  virtual void peer_down(const rpc::PeerDown& /*peer*/) MOOLINK_LOCKED {}
  // Service messages sent to the instance while it was not up have been dropped.
  virtual void undelivered(const Uid& /*instance*/) MOOLINK_LOCKED {}
  // Memory that the instance lent through the connection can be read while the object is held.
  virtual void connection_ended(const Uid& /*instance*/,
                                const std::shared_ptr<transport::Connection>& /*connection*/)
      MOOLINK_LOCKED {}
  // At an address that this peer dials, a peer has another key.
  virtual void refused(const rpc::Refused& /*refusal*/) MOOLINK_LOCKED {}
  // The exception barrier: one of these calls, or a service message, failed.
  virtual void failed(const Error& /*error*/) MOOLINK_LOCKED {}
  // close() was called: pending work fails, CLOSE may still be sent. May remove itself.
  virtual void closing() MOOLINK_LOCKED {}
  // Nothing that others need is in transit from it; close() waits briefly for that.
  virtual bool has_delivered() const MOOLINK_LOCKED { return true; }
};

// One peer: carries out the actions of its Node on transports, futures and workers. It passes the
// user's calls and the transports' events to the Node, and drains the Node's actions at the end of
// each (carry_out), behind the exception barrier. Its parts have the state of their own: Functions
// runs handlers, PeerTransports listens and dials, OpenConnections writes. bind::PyRpc and the
// peers of groups share it; a worker that runs a handler keeps it alive.
//
// Functions marked MOOLINK_UNLOCKED are for any thread and take the engine's lock; those marked
// MOOLINK_LOCKED are for machines beside the Node and for the loop, which hold it. close() ends it:
// it waits a moment for handlers and replies, and afterwards calls throw Exception{closed} and no
// action is carried out. The destructor needs no lock. In a forked child abandon() closes the
// descriptors, and the object is never destroyed.
class RpcPeer final : public std::enable_shared_from_this<RpcPeer>,
                      public Sender,
                      public Driven,
                      public Forkable,
                      private transport::Handler {
 public:
  static std::shared_ptr<RpcPeer> create(std::shared_ptr<Context> context, RpcOptions options);
  ~RpcPeer() override;

  const std::shared_ptr<Context>& context() const override { return context_; }
  const Uid& instance() const MOOLINK_UNCHECKED { return node_.instance(); }  // never changes

  // --- from any thread
  std::string name() MOOLINK_UNLOCKED;
  void set_name(const std::string& name) MOOLINK_UNLOCKED;
  void set_transports(const std::vector<wire::PathKind>& transports) MOOLINK_UNLOCKED;
  // Returns every address at which this peer can now be dialled through the new listener.
  // advertise: "host" or "host:port" to announce instead of the bound addresses.
  std::vector<std::string> listen(const std::string& address, const std::string& advertise = {})
      MOOLINK_UNLOCKED;
  void connect(const std::string& address) MOOLINK_UNLOCKED;

  std::shared_ptr<Future> call(const std::string& peer, const std::string& function,
                               wire::Payload arguments, Duration timeout, std::uint16_t lane)
      MOOLINK_UNLOCKED {
    const Engine::Lock lock = lock_open();
    return start_call(peer, function, std::move(arguments), timeout, lane);
  }
  // A call like call(), unless it would have to wait for the engine's lock, or this peer is closed:
  // then it returns nullptr and leaves `arguments` unchanged.
  std::shared_ptr<Future> call_at_once(const std::string& peer, const std::string& function,
                                       wire::Payload& arguments, Duration timeout,
                                       std::uint16_t lane) MOOLINK_UNLOCKED {
    const Engine::TriedLock lock = context_->try_lock();
    if (!lock.owns_lock() || closing_) return nullptr;
    engine_lock.assume();
    return start_call(peer, function, std::move(arguments), timeout, lane);
  }
  // A call whose handler sends items before its reply; at most `credit` of them (above 0) wait to
  // be taken. `timeout`: of each item.
  std::shared_ptr<Stream> stream(const std::string& peer, const std::string& function,
                                 wire::Payload arguments, Duration timeout, std::uint16_t lane,
                                 std::uint64_t credit) MOOLINK_UNLOCKED;
  // Throws Exception{invalid_argument} if the name is taken.
  // Peers whose key is that of another group than `group` (empty: any) cannot call it.
  void define(const std::string& function, CallHandler handler, const std::string& group = {})
      MOOLINK_UNLOCKED;
  // Waits until no call of it runs, unless the handler itself calls this; false: not defined.
  bool undefine(const std::string& function, const Engine::Interrupt& interrupt) MOOLINK_UNLOCKED;

  // Waits a moment for running handlers, flushes replies, sends CLOSE, fails pending calls.
  void close() MOOLINK_UNLOCKED;
  bool closed() const override { return closing_; }

  RpcStats stats() MOOLINK_UNLOCKED;
  std::vector<rpc::PeerInfo> peers() MOOLINK_UNLOCKED;
  std::vector<std::string> addresses() MOOLINK_UNLOCKED;
  rpc::Explanation explain(const std::string& peer) MOOLINK_UNLOCKED;
  // The last events of this peer, oldest first, a line each.
  std::vector<std::string> flight_recorder() MOOLINK_UNLOCKED;

  // --- for machines beside the Node (groups, accumulators)
  const rpc::Node& node() const MOOLINK_LOCKED { return node_; }
  // Sends a group's message to an instance (empty: any peer of the name); dials it by its name if
  // there is no session with it yet. Sends nothing to a peer whose key is that of another group.
  void send_service_to(const Uid& instance, const std::string& peer, rpc::Service service,
                       wire::Payload payload, const std::string& group = {}) MOOLINK_LOCKED;
  // An action from or for that peer failed: the session ends at both ends, for that reason, and
  // groups continue in another epoch.
  void fail_peer(const Uid& instance, const Error& error) MOOLINK_LOCKED;
  [[nodiscard]] Listed<PeerObserver> add(PeerObserver& observer) MOOLINK_LOCKED {
    return {observers_, observer};
  }
  // Passes descriptors to a peer of this host, where descriptors() takes them; false: there is no
  // connection through shared memory now.
  bool share(const Uid& instance, const Uid& key, std::span<const int> descriptors) MOOLINK_LOCKED;
  DescriptorExchange& descriptors() MOOLINK_LOCKED { return descriptors_; }
  // Whether the instance has mapped this segment of the lending pool, on the connection in use. If
  // not, passes the segment; without a connection, makes the peers connect, as a message of the
  // group would.
  bool lends(const Uid& instance, const std::string& peer, std::uint64_t segment,
             const std::string& group) MOOLINK_LOCKED;
  // The bytes of a segment that the instance lends. Null: it is not mapped, or its connection has
  // ended.
  LentBytes lent_by(const Uid& instance, std::uint64_t segment) MOOLINK_LOCKED;
  // For a second at most. Releases the lock meanwhile.
  void wait_until_delivered(Engine::Lock& lock, const std::function<bool()>& delivered)
      MOOLINK_LOCKED;
  ServiceRouter& router() MOOLINK_LOCKED { return router_; }
  // Ends a step of a machine beside the Node from outside the loop: writes out its messages, and
  // makes the loop check the clock again. `deadline` is that machine's own.
  void settle(Time deadline = kNever) MOOLINK_LOCKED;
  // Why this process cannot accept connections now; empty: it can.
  std::string why_none_connects(Time now) const MOOLINK_LOCKED {
    return transports_.why_none_connects(now);
  }
  // Tells the lenders of loans that have ended here.
  void return_loans() MOOLINK_LOCKED;
  // Releases an unused pre-posted buffer.
  struct HeldGrant;
  void release(wire::ConnectionId connection, std::uint64_t grant) MOOLINK_LOCKED;

  // Sender
  std::optional<PlacedMemory> place(const rpc::Receiver& receiver, std::size_t bytes)
      MOOLINK_UNLOCKED override;
  bool reads_device(const rpc::Receiver& receiver, int device) MOOLINK_UNLOCKED override;
  void reply(const rpc::CallKey& key, rpc::Reply reply) MOOLINK_LOCKED override;
  void send_item(const rpc::CallKey& key, wire::Payload item) MOOLINK_UNLOCKED override;
  void dropped(const rpc::CallKey& key, const std::string& function) MOOLINK_LOCKED override;

  // Driven, Forkable
  void tick(Time now) MOOLINK_LOCKED override;
  Time next_deadline() const MOOLINK_LOCKED override { return node_.next_deadline(); }
  void flush() MOOLINK_LOCKED override { connections_.flush(); }
  void describe(Time now, Describe how, std::string& text) const MOOLINK_LOCKED override;
  void abandon() noexcept MOOLINK_LOCKED override;

 private:
  // A call of this side without a result yet.
  struct Pending {
    std::shared_ptr<Awaitable> outcome;
    Stream* items = nullptr;  // the same, if it is a stream
  };

  RpcPeer(std::shared_ptr<Context> context, RpcOptions options);

  // ---- events of transports ----
  void opened(std::shared_ptr<transport::Connection> connection, const std::string& dialled_address)
      MOOLINK_LOCKED override;
  void closed(transport::Connection& connection, const Error& error, bool peer_dead)
      MOOLINK_LOCKED override;
  void dial_failed(const std::string& address, const Error& error) MOOLINK_LOCKED override;
  void turned_away(const Error& error) MOOLINK_LOCKED override;
  void cannot_accept(const Error& error) MOOLINK_LOCKED override;
  void received(transport::Connection& connection, wire::ReceivedFrame frame)
      MOOLINK_LOCKED override;
  std::span<std::byte> chunk_target(transport::Connection& connection, const wire::ChunkHead& head)
      MOOLINK_LOCKED override;
  void chunk_received(transport::Connection& connection, const wire::ChunkHead& head)
      MOOLINK_LOCKED override;
  void writable(transport::Connection& connection) MOOLINK_LOCKED override;
  void grant_filled(transport::Connection& connection, const wire::GrantPlace& place)
      MOOLINK_LOCKED override;
  void shared(transport::Connection&, const Uid& key, std::vector<Descriptor> descriptors)
      MOOLINK_LOCKED override {
    descriptors_.arrived(key, std::move(descriptors));
  }

  // ---- actions of the Node ----

  void perform(rpc::Write& action) MOOLINK_LOCKED;
  void perform(rpc::RunHandler& action) MOOLINK_LOCKED;
  void perform(rpc::Complete& action) MOOLINK_LOCKED;
  void perform(rpc::StreamItem& action) MOOLINK_LOCKED;
  void perform(rpc::CreditRaised& action) MOOLINK_LOCKED;
  void perform(rpc::ServiceMessage& action) MOOLINK_LOCKED;
  void perform(rpc::CancelHandler& action) MOOLINK_LOCKED;
  void perform(rpc::HoldHandlers& action) MOOLINK_LOCKED {
    functions_.hold(action.caller, action.hold);
  }
  void perform(rpc::Dial& action) MOOLINK_LOCKED;
  void perform(rpc::Establish& action) MOOLINK_LOCKED {
    if (transport::Connection* connection = connections_.find(action.connection)) {
      connection->peers_have(action.features);
      connection->establish();
    }
  }
  void perform(rpc::CloseConnection& action) MOOLINK_LOCKED;
  void perform(rpc::AllocateGrant& action) MOOLINK_LOCKED;
  void perform(rpc::FillGrant& action) MOOLINK_LOCKED;
  void refuse_path(wire::ConnectionId id, const Error& error) MOOLINK_LOCKED;
  bool can_bring_to_host(wire::ConnectionId connection, std::span<Buffer> parts) MOOLINK_LOCKED;
  void perform(rpc::PassSegments& action) MOOLINK_LOCKED;
  void perform(rpc::MapLoan& action) MOOLINK_LOCKED;
  void perform(rpc::PeerUp& action) MOOLINK_LOCKED;
  void perform(rpc::PeerDown& action) MOOLINK_LOCKED;
  void perform(rpc::Undelivered& action) MOOLINK_LOCKED;
  void perform(rpc::Refused& action) MOOLINK_LOCKED;
  void perform(rpc::Log& action) MOOLINK_LOCKED {
    context_->log(action.level, std::move(action.text));
  }
  void perform(rpc::Closed&) MOOLINK_LOCKED {
    if (node_closed_ != nullptr) context_->engine().finish(*node_closed_);
  }
  void carry_out() MOOLINK_LOCKED;
  // Ends the operation of an action that failed.
  void end(const rpc::RunHandler& action, const Error& error) MOOLINK_LOCKED;
  void end(const rpc::StreamItem& action, const Error& error) MOOLINK_LOCKED;
  void end(const rpc::CreditRaised& action, const Error& error) MOOLINK_LOCKED {
    node_.reply(io::now(), action.key, error);
  }
  // It is not sent again; the machines it is for handle lost sessions.
  void end(const rpc::ServiceMessage& action, const Error& error) MOOLINK_LOCKED {
    node_.fail_peer(io::now(), action.from, error);
  }
  void end(const rpc::Dial& action, const Error& error) MOOLINK_LOCKED {
    node_.dial_failed(io::now(), action.address, error);
  }
  template <class... Values>
  void tell_observers(void (PeerObserver::*what)(const Values&...), const Values&... values)
      MOOLINK_LOCKED;
  void record(FlightKind kind, std::string_view peer, std::uint64_t id, std::string_view text)
      MOOLINK_LOCKED {
    context_->recorder().record(now_, kind, node_.name(), peer, id, text);
  }
  void record_frame(FlightKind kind, wire::ConnectionId connection, wire::FrameType type)
      MOOLINK_LOCKED;
  transport::Connection* in_use(const rpc::Receiver& receiver) MOOLINK_LOCKED;
  std::shared_ptr<transport::Connection> forget(wire::ConnectionId id, const Uid& instance)
      MOOLINK_LOCKED;

  // ---- calls, ends ----

  Time clock() MOOLINK_LOCKED { return now_ = io::now(); }
  Engine::Lock lock_open() MOOLINK_TAKES_LOCK;
  std::shared_ptr<Future> start_call(const std::string& peer, const std::string& function,
                                     wire::Payload arguments, Duration timeout, std::uint16_t lane)
      MOOLINK_LOCKED;
  void follow(rpc::CallId id, const std::string& peer, const std::string& function, Pending pending)
      MOOLINK_LOCKED;
  void fail_pending() MOOLINK_LOCKED;
  void operation_done() MOOLINK_LOCKED;
  void call_done() MOOLINK_LOCKED;

  const std::shared_ptr<Context> context_;
  const rpc::Authenticator authenticator_;
  rpc::Node node_ MOOLINK_GUARDED;
  std::vector<rpc::Action> actions_ MOOLINK_GUARDED;  // memory of carry_out()
  ActionPump pump_;
  PeerTransports transports_ MOOLINK_GUARDED;
  OpenConnections connections_ MOOLINK_GUARDED;
  std::unordered_map<rpc::CallId, Pending> pending_ MOOLINK_GUARDED;
  Functions functions_;
  ServiceRouter router_ MOOLINK_GUARDED{node_, context_};
  DescriptorExchange descriptors_ MOOLINK_GUARDED;
  std::shared_ptr<LoanReturns> returns_;
  std::vector<PeerObserver*> observers_ MOOLINK_GUARDED;
  Listed<Driven> driven_ MOOLINK_GUARDED;
  Listed<Forkable> forks_ MOOLINK_GUARDED;
  RpcStats stats_ MOOLINK_GUARDED;
  Time now_ MOOLINK_GUARDED{};  // of the event being handled
  std::atomic<bool> closing_{false};
  bool finished_ MOOLINK_GUARDED = false;          // the Node has closed
  Waiter* node_closed_ MOOLINK_GUARDED = nullptr;  // close() waits for the Node
  bool told_refusal_ MOOLINK_GUARDED = false;  // the refusal of memory of CUDA devices was reported
};

}  // namespace moolink::runtime
