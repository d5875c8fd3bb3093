#pragma once

// Two hosts whose processes exchange messages through Session machines, over several paths that
// stall and break, while processes stop, die and come back.

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/lending.h"
#include "common/message_bytes.h"
#include "common/network.h"
#include "common/simulation.h"
#include "common/standing.h"
#include "session/session.h"

namespace moolink::sim {

struct Settings {
  Limits limits;
  std::vector<Path> paths;
  bool dials[2] = {true, false};
  int messages = 100;  // of each side
  Duration active{};   // messages and faults happen within
  bool mild = false;   // no fault lasts long enough to lose a session
  bool long_faults = false;
  bool crashes = false;
  bool pauses = false;

  static Settings from(Random& random);
};

struct Message {
  enum class State { unsent, sent, acked, lost_unwritten, lost };
  std::uint64_t number = 0;
  int side = 0;
  Uid from;
  Uid to;
  std::uint64_t session = 0;
  std::uint16_t lane = 0;
  std::uint8_t kind = 0;
  Time deadline = kNever;
  wire::Payload payload;
  std::set<std::uint32_t> lent;  // parts; those that are in no segment are in `unmappable`
  std::set<std::uint32_t> unmappable;
  std::vector<std::uint64_t> segments;  // of the lent ones, as they were last sent
  bool not_mapped = false;              // the receiver had no memory to map one
  State state = State::unsent;
  std::uint64_t order = 0;  // of sending
  bool delivered = false;
};

class World;

// Gives nothing back: a mutant that writes where it must not any more is to be caught, not to
// crash.
class KeptMemory final : public Allocator {
 public:
  MutableBuffer allocate(std::size_t size) override {
    return blocks_.emplace_back(HeapAllocator().allocate(size));
  }

 private:
  std::vector<MutableBuffer> blocks_;
};

// One process: its sessions with the other host's processes, and what the runtime does around them.
class Process final : public Endpoint {
 public:
  Process(World& world, int side, Uid instance);

  void received(ConnectionId connection, const wire::ReceivedFrame& frame) override;
  std::span<std::byte> chunk_target(ConnectionId connection, const wire::ChunkHead& head) override;
  void chunk_received(ConnectionId connection, const wire::ChunkHead& head) override;
  void closed(ConnectionId connection, const Error& error) override;
  void writable(ConnectionId connection) override;
  void grant_filled(ConnectionId connection, std::uint64_t grant) override;

  void opened(ConnectionId connection, const Path& path, bool dialled);
  void send(Message& message);
  void hold_calls(bool hold);
  // Something that the session carries cannot be sent any more.
  void end_session();
  void die(bool host_gone);
  bool alive() const { return alive_; }
  bool has_path(wire::PathKind kind) const;
  void check_at_end() const;

  const int side;
  const Uid instance;

 private:
  struct Greeting {
    Path path;
    bool dialled = false;
    bool handed_over = false;  // to the session
  };
  void note(const std::string& what) const;
  wire::Hello hello() const;
  void greet(ConnectionId connection, Greeting& greeting, const wire::ReceivedFrame& frame);
  void meet(const Uid& other);
  void act();
  void arm();
  void on_tick();
  void pump();
  void deliver(const session::Deliver& delivered);
  void lost(const session::Lost& lost);
  void check_written(const session::Write& write) const;
  wire::Payload lend(Message& message);
  void place(const Message& message, wire::Payload& payload);
  void map(const session::MapLoan& action);
  void pass(const session::PassSegments& action);
  void return_loan(std::uint64_t session, std::uint64_t loan);
  void hold(const Buffer& buffer);

  World* world_;
  bool alive_ = true;
  Uid other_;
  std::unique_ptr<session::Session> session_;
  std::uint64_t session_id_ = 0;  // that was last agreed about
  std::map<ConnectionId, Greeting> greetings_;
  std::vector<Message*> waiting_;  // refused by the window
  std::vector<session::Action> actions_;
  KeptMemory allocator_;
  OwnedMemory memory_;
  std::map<std::uint16_t, std::uint64_t> lane_order_;
  Time timer_ = kNever;
  std::uint64_t timer_token_ = 0;
};

class World {
 public:
  World(std::uint64_t seed, bool trace);
  std::uint64_t run();

  Simulation simulation;
  Network network{simulation};
  LendingMemory lending{simulation};
  std::set<std::pair<ConnectionId, std::uint64_t>> passed;  // connection of the lender, segment
  Settings settings;
  std::map<std::uint64_t, Message> messages;  // by number, which is the first word of the body
  std::set<std::uint64_t> lost_sessions;
  std::set<Uid> dead;
  std::uint64_t orders = 0;
  Time partitioned_until{};

  Process& process(int side) { return *processes_[side].back(); }

 private:
  void plan_messages();
  void plan_faults();
  void keep_connected();
  void fault();
  Duration fault_duration();
  void start(int side);
  void check_at_end();

  std::vector<std::unique_ptr<Process>> processes_[2];
  Time end_of_faults_{};
};

}  // namespace moolink::sim
