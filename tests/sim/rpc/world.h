#pragma once

// Processes that call one another through Node machines: a hub that all connect to, and peers that
// find each other through it. Connections stall and break, processes die and come back.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/lending.h"
#include "common/message_bytes.h"
#include "common/network.h"
#include "common/simulation.h"
#include "rpc/authenticator.h"
#include "rpc/node.h"
#include "rpc/outsider.h"

namespace moolink::sim {

struct Settings {
  Limits limits;
  int peers = 3;  // number 0 is the hub
  std::vector<int> hosts;
  Path tcp;
  Path shm;
  int calls = 150;
  Duration active{};
  bool mild = false;  // no fault loses a session
  bool crashes = false;
  bool pauses = false;
  bool blackhole = false;           // one connection is dropped without a word to either side
  bool imposter = false;            // somebody takes the name of a peer that lives
  bool outsider = false;            // somebody without a key is about
  std::vector<std::string> scopes;  // the group whose key each holds; the hub has the token
  int namesake_of = 0;  // a peer with the key of another group has its name; 0: none has

  static Settings from(Random& random);
};

// A call as its caller and its handler have seen it.
struct CallRecord {
  std::uint64_t number = 0;  // the first word of its arguments
  std::string caller;
  std::string peer;
  std::string group;  // as the caller names it; empty: it does not
  std::string function;
  Uid from;
  int from_number = 0;
  rpc::CallId id = 0;
  std::uint16_t lane = 0;
  std::uint64_t order = 0;
  Time began{};
  Time deadline = kNever;
  wire::Payload arguments;
  bool lends = false;                     // its large parts; the reply lends them back
  std::optional<Duration> handler_takes;  // none: it never replies
  bool handler_fails = false;
  // A stream, if its credit is not 0: this many items, then the reply.
  std::uint64_t credit = 0;
  std::uint64_t items = 0;
  Duration timeout{-1};  // from item to item

  std::uint64_t items_sent = 0;
  std::uint64_t items_allowed_to_send = 0;
  bool sender_waits = false;  // for credit
  std::uint64_t items_received = 0;
  std::uint64_t items_allowed = 0;
  Time last_progress{};
  int runs = 0;
  bool replied = false;
  bool cancel_seen = false;
  Uid ran_at;
  bool done = false;
  bool cancelled = false;
  std::optional<Error> error;
};

// The caller must say which of several peers of one name it means.
inline bool is_ambiguous(const Error& error) {
  return error.message.find("name the group") != std::string::npos;
}

class World;

class Process final : public Endpoint {
 public:
  Process(World& world, int number, std::string name, Uid instance);
  void start();

  void received(ConnectionId connection, const wire::ReceivedFrame& frame) override;
  std::span<std::byte> chunk_target(ConnectionId connection, const wire::ChunkHead& head) override;
  void chunk_received(ConnectionId connection, const wire::ChunkHead& head) override;
  void closed(ConnectionId connection, const Error& error) override;
  void writable(ConnectionId connection) override;
  void grant_filled(ConnectionId connection, std::uint64_t grant) override;

  void opened(ConnectionId connection, const Path& path, const std::string& dialled);
  void dial_failed(const std::string& address, const Error& error);
  void call(CallRecord& record, Duration timeout);
  void cancel(CallRecord& record);
  void send_service(const std::string& to);
  void send_service_to_ended(const Uid& other, const std::string& name_of_successor);
  int undelivered() const { return undelivered_; }
  void close();
  void die(bool host_gone);
  bool alive() const { return alive_; }
  Time started_at() const { return started_at_; }
  Time died_at() const { return died_at_; }  // kNever: it lives
  bool awake() const;
  bool is_closed() const { return closed_; }
  void check_at_end() const { memory_.check(); }
  void check_loans() const;
  std::vector<std::string> addresses() const;
  Uid host_key() const;
  const std::string& scope() const;

  const int number;
  const std::string name;
  const Uid instance;

  // Since when it sees that instance; kNever: it does not.
  Time sees_since(const Uid& other) const {
    return up_.contains(other) ? up_since_.at(other) : kNever;
  }
  // An outsider has this name, through shared memory.
  void claimed_by_outsider(const std::string& peer) { claimed_.insert(peer); }

 private:
  struct Services {
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
  };
  void note(const std::string& what) const;
  void act();
  void arm();
  void on_tick();
  void perform(rpc::Write& action);
  void perform(rpc::RunHandler& action);
  void perform(rpc::Complete& action);
  void perform(rpc::StreamItem& action);
  void perform(rpc::CreditRaised& action);
  void perform(rpc::ServiceMessage& action);
  void perform(rpc::CancelHandler& action);
  void perform(rpc::HoldHandlers& action);
  void perform(rpc::Dial& action);
  void perform(rpc::Establish&) {}
  void perform(rpc::CloseConnection& action);
  void perform(rpc::AllocateGrant& action);
  void perform(rpc::FillGrant& action);
  void perform(rpc::PassSegments& action);
  void perform(rpc::MapLoan& action);
  void perform(rpc::PeerUp& action);
  void perform(rpc::PeerDown& action);
  void hear(ConnectionId connection);
  bool name_may_be_taken(const rpc::PeerDown& action) const;
  void perform(rpc::Undelivered&) { ++undelivered_; }
  void perform(rpc::Refused& action);
  void perform(rpc::Log& action);
  void perform(rpc::Closed&);
  void finish_handler(CallRecord& record, const rpc::CallKey& key);
  void send_items(CallRecord& record, const rpc::CallKey& key);
  void use_item(CallRecord& record);
  wire::Payload lend(const CallRecord& record, const std::string& to);
  void take(const wire::Payload& payload);
  bool may_be_overwritten(const CallRecord& record) const;
  void check_result(const CallRecord& record, const rpc::Reply& result) const;
  void check_names(ConnectionId connection, const wire::Frame& frame) const;

  World* world_;
  bool alive_ = true;
  Time started_at_ = kNever;
  Time died_at_ = kNever;
  bool closed_ = false;
  HeapAllocator allocator_;
  rpc::Authenticator authenticator_;
  rpc::Node node_;
  std::vector<rpc::Action> actions_;
  OwnedMemory memory_;
  std::map<rpc::CallId, CallRecord*> calls_;
  std::map<rpc::CallKey, CallRecord*> running_;
  std::set<Uid> held_callers_;
  std::multimap<Uid, std::function<void()>> held_back_;  // handlers of their calls
  std::map<Uid, std::string> up_;
  std::map<Uid, Time> up_since_;
  std::map<Uid, Services> services_;  // with each instance
  int undelivered_ = 0;               // service messages
  std::map<int, Time> heard_;         // by number, but for greetings
  std::set<std::string> claimed_;     // see claimed_by_outsider()
  std::map<std::tuple<Uid, std::uint16_t, std::string>, std::uint64_t> lane_order_;
  Time timer_ = kNever;
  std::uint64_t timer_token_ = 0;
};

class World {
 public:
  static constexpr int kVictim = 1;  // whose name the imposter takes

  World(std::uint64_t seed, bool trace);
  std::uint64_t run();

  Process& process(int number) { return *processes_[static_cast<std::size_t>(number)].back(); }
  Process* listener(const std::string& address);
  bool partitioned(int a, int b) const;
  bool runs(const Uid& instance) const;
  std::uint64_t next_order() { return ++orders_; }
  bool has_namesake(int number) const {
    return settings.namesake_of != 0 && number == settings.namesake_of;
  }
  // Whether the caller has had the time to hear from the hub that the name, which two peers have,
  // does not mean the one at this place.
  bool knows_better(const CallRecord& record, const Process& place) const;
  // Whether another process with its name has lived while it ran.
  bool has_met_namesake(const Process& one) const;
  // Whether the two have a key in common.
  bool may_meet(int a, int b) const;
  // The outsider hears what one end of a connection writes of its greeting.
  void overhear(ConnectionId connection, const wire::Frame& frame);
  int other_end(ConnectionId connection, int number) const;  // below 0: the outsider's
  void connected(ConnectionId dialler, ConnectionId acceptor, int from, int to);
  // Whether a dial ends at the outsider instead.
  bool outsider_takes_dial();

  Simulation simulation;
  Network network{simulation};
  LendingMemory lending{simulation};
  Settings settings;
  std::map<std::uint64_t, CallRecord> calls;
  Process* imposter = nullptr;
  Process* namesake = nullptr;
  Outsider outsider{*this};
  std::vector<Overheard> overheard;
  int dials_taken = 0;

 private:
  void start(int number);
  void plan_calls();
  CallRecord& new_call(int from, int to);
  void plan_faults();
  void fault();
  void blackhole();
  Duration fault_duration();
  void plan_imposter();
  void plan_namesake();
  void probe_names();
  void probe();
  void check_calls() const;
  void check_at_end();
  void check_successor();

  std::vector<std::vector<std::unique_ptr<Process>>> processes_;
  std::unique_ptr<Process> imposter_;
  std::unique_ptr<Process> namesake_;
  std::map<ConnectionId, std::size_t> greetings_;  // of open connections, in `overheard`
  std::uint64_t orders_ = 0;
  std::map<int, Time> partitioned_until_;  // one peer from all others
  Time end_of_faults_{};
  std::vector<std::uint64_t> probes_;
  std::vector<std::uint64_t> ambiguous_;  // of a name that two groups have
};

}  // namespace moolink::sim
