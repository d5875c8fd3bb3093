#pragma once

// One simulated process with everything that a real one has below Python: a node with its
// sessions, and on it either the broker, or a group's member, the engine of the rounds, the
// accumulator's machine and its user. Machines are bound to one another as cpp/runtime does it.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "accumulate/machine.h"
#include "base/buffer.h"
#include "collective/engine.h"
#include "common/learner.h"
#include "common/network.h"
#include "group/broker.h"
#include "group/member.h"
#include "rpc/node.h"

namespace moolink::sim {

class World;

class Process final : public Endpoint {
 public:
  Process(World& world, int number, Uid instance);
  void start();

  void received(ConnectionId connection, const wire::ReceivedFrame& frame) override;
  std::span<std::byte> chunk_target(ConnectionId connection, const wire::ChunkHead& head) override;
  void chunk_received(ConnectionId connection, const wire::ChunkHead& head) override;
  void closed(ConnectionId connection, const Error& error) override;
  void writable(ConnectionId connection) override;
  void grant_filled(ConnectionId connection, std::uint64_t grant) override;

  // Dies; unless `quietly`, its system closes its connections.
  void die(bool quietly);
  void leave();
  void stop(Duration duration);
  void send_user_away(Duration duration);

  bool alive() const { return alive_; }
  bool awake() const;
  bool answers_dials() const { return alive_ || !vanished_; }
  bool is_broker() const { return number == 0; }
  // It runs, but for the news of its end that others have not got yet.
  bool staying() const { return alive_ && !leaving_; }
  const Learner& learner() const { return *learner_; }
  const accumulate::Machine& machine() const { return *machine_; }
  std::string waiting_for() const;  // who waits for whom
  std::vector<std::string> addresses() const;
  Uid host_key() const;
  // The longest time between two rounds that its user has applied, from watch_pauses() on.
  Duration longest_pause() const { return longest_pause_; }
  void watch_pauses();
  // Runs when the process can, unless it has died by then.
  void later(Duration delay, std::function<void()> action);

  const int number;
  const std::string name;
  const Uid instance;
  bool disturbed = false;  // it may lose what it contributed, for something has befallen it

 private:
  using Member = group::Member;
  using Broker = group::Broker;
  using Engine = collective::Engine;
  using Machine = accumulate::Machine;

  // process.cc: the node and the network
  Time now() const;
  void note(const std::string& what) const;
  void run(std::function<void()> action);
  void act();
  bool act_on_node();
  void arm();
  void tick();
  Time next_deadline() const;
  void dial(const std::string& address);
  void send(const Uid& to, const std::string& to_name, rpc::Service service, wire::Payload payload);
  void perform(rpc::Write& action);
  void perform(rpc::RunHandler& action);
  void perform(rpc::Complete& action);
  void perform(rpc::StreamItem&) {}
  void perform(rpc::CreditRaised&) {}
  void perform(rpc::ServiceMessage& action);
  void perform(rpc::CancelHandler& action);
  void perform(rpc::HoldHandlers&) {}
  void perform(rpc::Dial& action);
  void perform(rpc::Establish&) {}
  void perform(rpc::CloseConnection& action);
  void perform(rpc::AllocateGrant& action);
  void perform(rpc::FillGrant& action);
  void perform(rpc::PassSegments&) {}
  void perform(rpc::MapLoan&) {}
  void perform(rpc::PeerUp& action);
  void perform(rpc::PeerDown& action);
  void perform(rpc::Undelivered& action);
  void lost_session(const Uid& peer, group::Down how);
  void perform(rpc::Refused& action);
  void perform(rpc::Log& action);
  void perform(rpc::Closed&) {}
  void make_call();

  // peer.cc: what rides on the node
  void make_group();
  void make_machine();
  void user_turn();
  void service_message(rpc::ServiceMessage& action);
  bool act_on_peer();
  bool act_on_broker();
  void perform(Member::Action& action);
  void check_view(const group::View& view);
  void perform(Engine::Action& action);
  void perform(accumulate::Action& action);
  void enter(const accumulate::EnterEpoch& enter);
  void reduce(accumulate::Reduce& reduction);
  void reduced(Engine::Done& done);
  void demote(const accumulate::Demote& demote);
  void note_round();

  World* world_;
  bool alive_ = true;
  bool vanished_ = false;
  bool leaving_ = false;
  HeapAllocator allocator_;
  rpc::Authenticator authenticator_;
  rpc::Node node_;
  std::vector<rpc::Action> node_actions_;
  Time timer_ = kNever;
  std::uint64_t timer_token_ = 0;

  std::set<rpc::CallKey> running_;
  std::map<rpc::CallId, std::uint64_t> calls_;
  std::map<std::pair<Uid, std::uint16_t>, std::uint64_t> lane_order_;

  std::unique_ptr<Broker> broker_;
  Uid broker_instance_;  // the member's; empty: not connected
  std::uint64_t last_epoch_ = 0;
  Uid lineage_;  // of the last view
  std::unique_ptr<Member> member_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Machine> machine_;
  std::unique_ptr<Learner> learner_;
  bool made_ = false;  // its accumulator; until then nobody hears its machine, and it hears nobody
  Time user_away_until_ = Time::min();
  std::map<collective::OpId, std::pair<std::uint64_t, std::uint64_t>> reductions_;  // epoch, round
  std::uint64_t applied_ = 0;
  Time last_round_ = kNever;
  Duration longest_pause_{};
};

}  // namespace moolink::sim
