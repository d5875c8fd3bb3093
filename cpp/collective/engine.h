#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/barrier.h"
#include "base/buffer.h"
#include "base/error.h"
#include "base/uid.h"
#include "collective/kernels.h"
#include "collective/messages.h"
#include "collective/name_counts.h"
#include "collective/operation.h"
#include "collective/shared_pipeline.h"
#include "wire/payload.h"

namespace moolink::collective {

// All operations of one set of members in one epoch: the member's side of allreduce over messages,
// a machine without I/O. Every member starts the same operations; names tell them apart, and the
// n-th start of a name at one member meets the n-th start at the others. An operation whose data
// arrives before the local start waits for it.
//
// How a runtime drives it: call an event, then take_actions() and do them in order:
//   Send     give the payload to the service `collective` of that peer
//   Sum      run(task) on any thread, then summed(op, run, slice); no arithmetic in the machine
//   Combine  call the user's Python operation on the payloads (rank 0 only), then combined(...)
//   Pass     start the operation in the shared pipeline of this epoch (they come in order), then
//            passed(s) when it has ended there, unless it was abandoned
//   Abandon  give it up there
//   Done     complete the operation's future
// Payloads of one service and several engines (a group's operations, its accumulator's rounds) are
// told apart by scope_of().
class Engine {
 public:
  struct Config {
    std::string scope;                  // equal at all members; not shared by two engines
    Uid self;                           // this peer's instance
    std::shared_ptr<Allocator> memory;  // for results; null: the heap
    std::size_t early_bytes = std::size_t{1} << 30;  // kept for operations not started here yet
  };

  // Who takes part, in rank order; this peer must be among them, otherwise nothing can be started.
  struct Members {
    std::uint64_t epoch = 0;
    std::vector<Uid> instances;
    std::vector<std::string> names;
    bool one_host = false;
    std::vector<Uid> host_keys = {};  // equal for members of one host; empty: all are on one
  };

  struct Options {
    bool retry = false;  // on a change of epoch start again in the new one instead of failing
    // Names the operation by the caller's own number instead of by counting starts of the name.
    std::optional<std::uint64_t> number;
    // Where the result is put, of the result's size; else in new memory. It is written until Done
    // only. Large allreduces pass through shared memory only if it is given.
    std::optional<MutableBuffer> output = {};
    // Inputs are the user's memory, which is not referred to after Done.
    bool lent = false;
  };

  struct Send {
    Uid instance;
    std::string name;
    wire::Payload payload;
  };
  // `run`: one beginning of the operation. A retry is another one: what the old one had under way
  // comes back with its own number, and is of no use any more.
  struct Sum {
    OpId op = 0;
    RunId run = 0;
    std::uint32_t slice = 0;
    Work task;
  };
  struct Combine {
    OpId op = 0;
    RunId run = 0;
    std::vector<wire::Payload> payloads;  // in rank order
  };
  struct Pass {
    PipelineOperation operation;
  };
  struct Abandon {
    std::uint64_t s = 0;
  };
  struct Done {
    OpId op = 0;
    std::string name;
    Error error;          // set when the operation failed; then the rest is empty
    Buffer tensor;        // result of start()
    wire::Payload value;  // result of start_value()
  };
  using Action = std::variant<Send, Sum, Combine, Pass, Abandon, Done>;

  explicit Engine(Config config);

  // A new epoch. Unfinished operations fail with group_changed (the error says `reason`) or, with
  // Options::retry, start again with the same name and input, in their first order.
  void set_members(Members members, const Error& reason);

  // No operation goes on, or refers to the user's memory; nothing is said of them.
  void drop_operations();

  // All members of this epoch have attached to its pipeline: rank 0 passes through it what it can.
  void use_shared_memory(std::uint64_t epoch);

  // A collective of blocks of `spec.count()` elements. Every member named in spec.contributors
  // (empty: everyone) passes one or more equally long inputs, others pass none. Inputs are read
  // until Done and never written. Throws Exception{invalid_argument} for a wrong input,
  // Exception{closed} without an epoch.
  OpId start(std::string name, OpSpec spec, std::vector<Buffer> inputs, Options options);
  // Any value, combined by a Python operation on rank 0, whose result everyone gets.
  OpId start_value(std::string name, wire::Payload value, Options options);

  void received(const Uid& from, const wire::Payload& payload);
  void summed(OpId op, RunId run, std::uint32_t slice);
  void combined(OpId op, RunId run, std::variant<wire::Payload, Error> result);
  // Operation s of the pipeline has ended with its result in place.
  void passed(std::uint64_t s);
  // It could not be passed here: fails at all.
  void failed(std::uint64_t s, Error error);
  // Fails the operation here and at the others (a time-out, a cancelled future).
  void cancel(OpId op, Error error);
  // Asks the member that knows whom all wait for to fail it everywhere with `error` and their
  // names. False: this member knows, or it is not under way.
  bool ask_why(OpId op, const Error& error);

  // Set if this member cannot go on with what it has begun, for lack of memory for example: it is
  // to leave these members. Look after every event.
  Error take_failure() { return std::exchange(failure_, {}); }

  std::vector<Action> take_actions() { return std::exchange(actions_, {}); }

  const Members& members() const { return members_; }
  std::optional<std::uint32_t> rank() const { return rank_; }
  std::size_t pending() const { return operations_.size(); }
  // Names of the members whose data an operation still lacks here, for errors and stats.
  std::vector<std::string> waiting_for(OpId op) const;

  // Operations of this epoch that others have begun and this member has not: each with the names of
  // those of whom this is known here.
  std::map<std::string, std::vector<std::string>> begun_elsewhere() const;

  bool in_shared_memory(OpId op) const;

  // The scope of a payload of this service; throws Exception{wire}.
  static std::string scope_of(const wire::Payload& payload);

 private:
  struct Early {
    Uid instance;
    Frame frame;
    std::vector<Buffer> parts;
    std::size_t bytes = 0;
  };
  // Frames of one operation that was not started here, in the order in which they came.
  struct EarlyFrames {
    std::vector<Early> frames;
    bool failed = false;  // it can only fail: its data is not kept
  };

  void begin(OpId id, Operation::Request request);
  MutableBuffer take_residual(const std::string& name, const OpSpec& spec);
  void keep_residual(const Operation& operation);
  // The exception barrier: what a peer has broken fails the operation; all else, the engine.
  template <class Work>
  void guarded(OpId id, Work&& work) {
    guard(work, [&](const Error& error) {
      if (error.code == ErrorCode::wire) return cancel(id, error);
      failure_ = error;
    });
  }
  void carry_out(OpId id);
  void finish(OpId id, Operation& operation, bool unsettled);
  void pass(std::uint64_t s, const OpSpec& spec, const Operation* operation);
  bool settle(const Uid& from, const Frame& frame);
  void send(std::uint32_t rank, const OpKey& key, Operation::Outgoing outgoing);
  void apply(Operation& operation, const Uid& from, const Frame& frame,
             const std::vector<Buffer>& parts);
  bool is_member(const Uid& instance) const;
  void keep_early(const Uid& from, Frame frame, const wire::Payload& payload);
  void drop_early_data(EarlyFrames& early);
  void drop_outdated_early();
  void replay_early(const OpKey& key);
  Operation* find(const OpKey& key);

  Config config_;
  Members members_;
  std::optional<std::uint32_t> rank_;
  std::shared_ptr<const Hosts> hosts_;
  // What compression has left in this epoch, by the operations' names; the last used one is last.
  std::deque<std::pair<std::string, MutableBuffer>> residuals_;
  OpId next_op_ = 1;
  RunId next_run_ = 1;
  std::map<OpId, Operation> operations_;  // in order of their start
  std::map<OpKey, OpId> by_key_;
  NameCounts starts_;                           // in this epoch
  std::map<OpId, Operation::Request> waiting_;  // to be retried once there is an epoch
  // Of an earlier epoch, complete, whose results are being put in their places.
  std::map<OpId, Operation> ending_;
  bool shared_ready_ = false;
  std::uint64_t last_shared_ = 0;         // that rank 0 has given
  std::uint64_t last_passed_ = 0;         // to the runtime
  std::map<std::uint64_t, Pass> passes_;  // that wait for earlier ones
  std::map<std::uint64_t, OpId> in_shared_memory_;
  std::map<OpKey, OpSpec> unsettled_;  // ended here, but rank 0 may yet say Go
  std::map<std::pair<std::uint64_t, OpKey>, EarlyFrames> early_;  // by epoch and key
  std::size_t early_bytes_ = 0;
  std::vector<Action> actions_;
  Error failure_;
};

}  // namespace moolink::collective
