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
// a machine without I/O. Every member starts the same operations; names distinguish them, and the
// n-th start of a name at one member matches the n-th start at the others. An operation whose data
// arrives before the local start waits for it.
//
// How a runtime drives it: call an event, then take_actions() and do them in order:
//   Send     give the payload to the service `collective` of that peer
//   Sum      run(work) on any thread, then summed(op, run, id); no arithmetic in the machine
//   Combine  call the user's Python operation on the payloads (rank 0 only), then combined(...)
//   Pass     start the operation in the shared pipeline of this epoch (they come in order), then
//            passed(s) when it has ended there, unless it was abandoned
//   Publish  SharedPipeline::publish(); what take_sums() returns there goes to summed_here()
//   Abandon  give it up there
//   Done     complete the operation's future
// The scope, with which each payload begins, separates those of several engines of one service (a
// group's operations, its accumulator's rounds).
class Engine {
 public:
  struct Config {
    std::string scope;                  // equal at all members; not shared by two engines
    Uid self;                           // this peer's instance
    std::shared_ptr<Allocator> memory;  // for results; null: the heap
    std::size_t early_bytes = std::size_t{1} << 30;  // kept for operations not started here yet
  };

  using Options = Operation::Options;
  struct Send {
    Uid instance;
    std::string name;
    wire::Payload payload;
  };
  // `run`: one run of the operation. A retry is another run: late tasks of the old one return with
  // its number, and are discarded.
  struct Sum {
    OpId op = 0;
    RunId run = 0;
    std::uint32_t id = 0;
    Work work;
  };
  struct Combine {
    OpId op = 0;
    RunId run = 0;
    std::vector<wire::Payload> payloads;  // in rank order
  };
  struct Pass {
    PipelineOperation operation;
  };
  struct Publish {
    OpId op = 0;
    std::uint64_t s = 0;
    std::uint32_t chunk = 0;
    Buffer result;
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
  using Action = std::variant<Send, Sum, Combine, Pass, Publish, Abandon, Done>;

  explicit Engine(Config config);

  // Begins an epoch; unless this peer is among its members, nothing can start. Unfinished
  // operations fail with `reason` (group_changed) or, with Options::retry, start again with the
  // same name and input, in their original order.
  void set_members(SharedMembers members, const Error& reason);

  // Drops all operations and their references to the user's memory; no action reports them.
  void drop_operations();

  // All members of this epoch have attached its pipeline: rank 0 now uses it where possible.
  void use_shared_memory(std::uint64_t epoch) {
    if (epoch == members_->epoch) shared_ready_ = true;
  }

  // A collective of blocks of `spec.count()` elements. Every member in spec.contributors (empty:
  // all) passes one or more equally long inputs, others pass none. Inputs are read until Done and
  // never written. Throws Exception{invalid_argument} for a wrong input, Exception{closed} without
  // an epoch.
  OpId start(std::string name, OpSpec spec, std::vector<Buffer> inputs, Options options);
  // Any value, combined by a Python operation on rank 0; all members get the result.
  OpId start_value(std::string name, wire::Payload value, Options options);

  void received(const Uid& from, const wire::Payload& payload);
  // Call it after more of the inputs of operations with Options::written has been written.
  void inputs_written();
  void summed(OpId op, RunId run, std::uint32_t task);
  void combined(OpId op, RunId run, std::variant<wire::Payload, Error> result);
  // Operation s of the pipeline has ended with its result in place.
  void passed(std::uint64_t s);
  // A host's sum in operation s of the pipeline.
  void summed_here(SharedPipeline::Sum sum);
  // Fails the operation here and at the others (a time-out, a cancelled future).
  void cancel(OpId op, Error error);
  // Asks the member that knows whose data is missing to fail it at all members with `error` and the
  // names. False: this member knows, or it is not under way.
  bool ask_why(OpId op, const Error& error);

  // Set if this member cannot continue what it has begun, for example for lack of memory: it must
  // leave these members. Check after every event.
  Error take_failure() { return std::exchange(failure_, {}); }

  std::vector<Action> take_actions() { return std::exchange(actions_, {}); }

  const EpochMembers& members() const { return *members_; }
  std::optional<std::uint32_t> rank() const { return rank_; }
  std::size_t pending() const { return operations_.size(); }
  // Names of the members whose data an operation still lacks here, for errors and stats.
  std::vector<std::string> waiting_for(OpId op) const;

  // Operations of this epoch that others have begun and this member has not: each with the names of
  // the members known to have begun it.
  std::map<std::string, std::vector<std::string>> begun_elsewhere() const;

  bool in_shared_memory(OpId op) const {
    const auto found = operations_.find(op);
    return found != operations_.end() && found->second.shared() != 0;
  }

 private:
  // Only members of the group have one.
  void require_rank(const std::string& operation) const {
    if (rank_) return;
    throw Exception(ErrorCode::closed,
                    "operation '" + operation +
                        "': this peer takes part in no operation of the group: it is an observer, "
                        "or not in the group yet");
  }
  struct Early {
    Uid instance;
    Frame frame;
    std::vector<Buffer> parts;
    std::size_t bytes = 0;
  };
  // Frames of one operation that was not started here, in order of arrival.
  struct EarlyFrames {
    std::vector<Early> frames;
    bool failed = false;  // it can only fail: its data is not kept
  };

  void begin(OpId id, Operation::Request request);
  MutableBuffer take_residual(const std::string& name, const OpSpec& spec);
  void keep_residual(const Operation& operation);
  // The exception barrier: a peer's wire error fails the operation; any other error, the engine.
  template <class Work>
  void guarded(OpId id, Work&& work) {
    guard(work, [&](const Error& error) {
      if (error.code == ErrorCode::wire) return cancel(id, error);
      failure_ = error;
    });
  }
  void carry_out(OpId id);
  // Passes an event to the operation, and carries out what follows. Null: does nothing.
  template <class Event>
  void tell(Operation* operation, Event&& event) {
    if (operation == nullptr) return;
    const OpId id = operation->id();
    guarded(id, [&] {
      event(*operation);
      carry_out(id);
    });
  }
  void finish(OpId id, Operation& operation, bool unsettled);
  void pass(std::uint64_t s, const OpSpec& spec, const Operation* operation);
  Operation* passing(std::uint64_t s);
  bool settle(const Uid& from, const Frame& frame);
  void send(std::uint32_t rank, const OpKey& key, Operation::Outgoing outgoing);
  void apply(Operation& operation, const Uid& from, const Frame& frame,
             const std::vector<Buffer>& parts);
  void keep_early(const Uid& from, Frame frame, const wire::Payload& payload);
  void drop_early_data(EarlyFrames& early);
  void drop_outdated_early();
  void replay_early(const OpKey& key);
  Operation* find(OpId id);
  Operation* find(OpId id, RunId run);
  Operation* find(const OpKey& key);

  Config config_;
  SharedMembers members_ = std::make_shared<const EpochMembers>();
  std::optional<std::uint32_t> rank_;
  // Residuals of compression in this epoch, by the operations' names; the last used one is last.
  std::deque<std::pair<std::string, MutableBuffer>> residuals_;
  OpId next_op_ = 1;
  RunId next_run_ = 1;
  std::map<OpId, Operation> operations_;  // in order of their start
  std::map<OpKey, OpId> by_key_;
  NameCounts starts_;                           // in this epoch
  std::map<OpId, Operation::Request> waiting_;  // to be retried once there is an epoch
  // Complete operations of an earlier epoch whose results are being put in their places.
  std::map<OpId, Operation> ending_;
  bool shared_ready_ = false;
  std::uint64_t last_shared_ = 0;         // assigned by rank 0
  std::uint64_t last_passed_ = 0;         // to the runtime
  std::map<std::uint64_t, Pass> passes_;  // waiting for earlier ones
  std::map<OpKey, OpSpec> unsettled_;     // ended here, but rank 0 may still send Go
  std::map<std::pair<std::uint64_t, OpKey>, EarlyFrames> early_;  // by epoch and key
  std::size_t early_bytes_ = 0;
  std::vector<Action> actions_;
  Error failure_;
};

}  // namespace moolink::collective
