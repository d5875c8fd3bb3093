#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/progress.h"
#include "collective/epoch_members.h"
#include "collective/exchange.h"
#include "collective/kernels.h"
#include "collective/messages.h"
#include "collective/passage.h"
#include "collective/pipeline_operation.h"
#include "collective/work.h"
#include "wire/payload.h"

namespace moolink::collective {

using OpId = std::uint64_t;
using RunId = std::uint64_t;  // of one run of an operation; a retry is another run

// The id of the task that sums this member's own inputs before anything is sent, or copies an input
// that is the user's: the user gets it back before others have read all messages.
inline constexpr std::uint32_t kOwnInputs = 0xffffffff;
// Of the task that puts the result into the user's output.
inline constexpr std::uint32_t kResult = 0xfffffffe;

// Allreduces of at least this many bytes among members that share hosts wait for rank 0's Go, which
// costs two messages and says whether they pass through shared memory.
inline constexpr std::uint64_t kSharedBytes = std::uint64_t{64} << 10;

// One member's part of one collective.
// An allreduce is an exchange of partial sums (Portion, exchange.h). Without shared memory each
// member takes part in it as if it were a host. With it, a large allreduce passes through the
// pipeline of each host, and the owners of slices exchange the hosts' sums. The order of the
// additions is fixed, so all members end with the same bits. A value with a Python operation goes
// to rank 0 and its result to all members instead. An accumulator's round is an allreduce; its
// leader has decided whether it uses shared memory. Every other collective that can use it begins
// with Started to rank 0, which sends Go when all have started the same: through shared memory, or
// over messages (in kinds other than allreduce, a Piece goes straight to its place).
class Operation {
 public:
  struct Options {
    bool retry = false;  // on a change of epoch start again in the new one instead of failing
    // The caller's own number for the operation, instead of a count of starts of the name.
    std::optional<std::uint64_t> number;
    // Memory for the result, of its size; else new memory. It is written only until Done. Large
    // allreduces of one host's members pass through shared memory only if it is given.
    std::optional<MutableBuffer> output = {};
    // Inputs are the user's memory, not used after Done.
    bool lent = false;
    // How far an allreduce's inputs are written, if another thread is still writing them.
    // Engine::inputs_written() reports that more is written.
    Written written = {};
    // Not 0: every member passes this allreduce through shared memory into `output`, under this
    // number and without rank 0's Go. All numbers of an epoch come either from here or from rank 0.
    std::uint64_t shared = 0;
  };

  // The request, from which the operation can start again in another epoch.
  struct Request {
    std::string name;
    std::variant<OpSpec, wire::Payload> what;
    std::vector<Buffer> inputs;  // of a tensor operation
    Options options = {};
  };
  // Where it runs.
  struct Place {
    std::uint32_t rank = 0;
    SharedMembers members;
    MutableBuffer residual = {};  // of compression between hosts, or empty
  };
  struct Outgoing {
    std::uint32_t to = 0;
    decltype(Frame::content) content;
    std::vector<Buffer> parts;
  };
  using Task = Exchange::Task;
  // The work after an event; taken by the engine.
  struct Effects {
    std::vector<Outgoing> outgoing;
    std::vector<Task> tasks;
    std::optional<std::vector<wire::Payload>> combine;
    std::optional<std::uint64_t> pass;      // through shared memory, as this number
    std::optional<std::uint64_t> abandon;   // the same
    std::vector<Exchange::Result> publish;  // in shared memory: chunks of this member's slice
    bool ready_to_go = false;               // rank 0's: all have started; go() is awaited
    // Rank 0 may still send Go, or must hear that it must not.
    bool unsettled = false;
    bool finished = false;
  };

  Operation(OpId id, RunId run, OpKey key, Request request, Place place, Allocator& memory);

  void begin();
  // Rank 0's decision: a number in shared memory, or 0 for messages.
  void go(std::uint64_t shared);
  // It has passed through shared memory.
  void passed() {
    if (!error_) effects_.finished = true;
  }
  // This host's sum of this member's slice of a chunk.
  void summed_here(std::uint32_t chunk, Buffer sum);
  void received(std::uint32_t from, const decltype(Frame::content)& content,
                const std::vector<Buffer>& parts);
  void done(std::uint32_t task);
  void inputs_written();
  void combined(std::variant<wire::Payload, Error> result);
  // Asks the member that knows whose data is missing to fail it at all members with `error` and the
  // names. False: no other member knows it better than this one.
  bool ask_why(const Error& error);
  // Fails here and, unless `local`, at all members.
  void fail(Error error, bool local = false);

  Effects take_effects() { return std::exchange(effects_, {}); }
  Request take_request() { return std::move(request_); }

  OpId id() const { return id_; }
  RunId run() const { return run_; }
  const OpKey& key() const { return key_; }
  bool retry() const { return request_.options.retry; }
  const Error& error() const { return error_; }
  const MutableBuffer& tensor() const { return has_output() ? *request_.options.output : result_; }
  const MutableBuffer& residual() const { return place_.residual; }
  const wire::Payload& value() const { return value_; }
  std::vector<std::string> waiting_for() const;
  const OpSpec* spec() const { return std::get_if<OpSpec>(&request_.what); }
  const Request& request() const { return request_; }
  // The result is complete and being put in its place: it cannot fail any more.
  bool ending() const { return ending_; }
  // Its number in shared memory; 0: it does not use shared memory.
  std::uint64_t shared() const { return shared_; }
  // Whether it can pass through shared memory, if rank 0 says so.
  bool may_share() const { return members().one_host || spec()->kind == Kind::all_reduce; }
  // The operation as a task for the pipeline of this rank's host.
  static PipelineOperation pipeline_operation(const OpSpec& spec, const EpochMembers& members,
                                              std::uint32_t rank);

 private:
  bool has_output() const { return spec() != nullptr && request_.options.output; }
  bool is_all_reduce() const { return spec()->kind == Kind::all_reduce; }
  std::size_t partial_size() const { return tensor::item_size(partial_dtype(spec()->dtype)); }
  const EpochMembers& members() const { return *place_.members; }
  bool shares_hosts() const { return members().hosts.share_memory(); }
  const std::string& name_of(std::uint32_t rank) const { return members()[rank].name; }
  template <class Bytes>
  Bytes bytes_of(const Bytes& whole, const Range& range) const {
    return whole.slice(range.begin * item_size_, range.count() * item_size_);
  }
  // A task that puts elements of the result in their place.
  void put(std::uint32_t task, Buffer elements, MutableBuffer place) {
    SumTask copy{spec()->dtype, spec()->op, 1, {std::move(elements)}, std::move(place)};
    effects_.tasks.push_back({task, std::move(copy)});
  }

  std::optional<std::uint32_t> member_to_ask() const;
  bool must_ask() const;
  void started(std::uint32_t from, const OpSpec& theirs);
  void use_messages();
  void gather_own_inputs();
  void send_own_inputs();
  void send_pieces();
  void place_piece(std::uint32_t from);
  void use_shared_memory(std::uint64_t number);
  // Tasks of the exchange and those that put its results in place share one numbering.
  static constexpr std::uint32_t of_exchange(std::uint32_t task) { return 2 * task + 1; }
  static constexpr std::uint32_t of_own(std::uint32_t chain) { return 2 * chain; }
  static constexpr bool is_of_exchange(std::uint32_t task) { return task % 2 == 1; }
  static Passage passage_of_host(const OpSpec& spec, const Hosts& hosts, std::uint32_t host);
  Passage passage_of_host() const {
    return passage_of_host(*spec(), members().hosts, members().hosts.of[place_.rank]);
  }
  Range slice_of(std::uint32_t lane, std::uint64_t chunk) const;
  // The hosts of the exchange.
  const Hosts& hosts() const { return shared_ != 0 ? members().hosts : members().alone; }
  bool is_guest() const { return hosts().is_guest(place_.rank); }
  Schedule schedule() const;
  bool in_trees() const { return schedule() == Schedule::tree; }
  std::vector<Range> chains_of(std::uint32_t lane) const;
  void begin_exchange();
  void await_results();
  bool result_for_guest(std::uint32_t from, const Portion& portion, const Buffer& elements);
  void take_early_portions();
  void provide_written();
  void put_in_place(Exchange::Result result);
  void portion(std::uint32_t from, const Portion& portion, const std::vector<Buffer>& parts);
  bool take_portion(std::uint32_t from, const Portion& portion, const Buffer& elements);
  bool keep_early(std::uint32_t from, const Portion& portion, Buffer elements);
  std::uint32_t exchanging_rank(std::uint32_t host) const {
    return hosts().leader(host, *hosts().lane(place_.rank));
  }
  void take_exchange_effects();
  void piece(std::uint32_t from, const OpSpec& theirs, const std::vector<Buffer>& parts);
  void value_arrived(std::uint32_t from, const std::vector<Buffer>& parts);
  void finish_when_complete();
  void refuse(std::uint32_t from, const std::string& what);
  std::string difference(std::uint32_t from, const OpSpec& theirs) const;
  void failed_elsewhere(std::uint32_t from, const Failure& failure);
  void to_others(const decltype(Frame::content)& content, const std::vector<Buffer>& parts);

  OpId id_;
  RunId run_;
  OpKey key_;
  Request request_;
  Place place_;
  Allocator& memory_;
  std::size_t item_size_ = 1;
  Buffer input_;  // this member's, the sum of its own inputs
  MutableBuffer sum_of_inputs_;
  MutableBuffer result_;
  std::map<std::uint32_t, Buffer> pieces_;  // of any kind but allreduce, by sender
  std::optional<Exchange> exchange_;        // among hosts in a lane, or among all members
  std::uint32_t provided_ = 0;              // chains, among all members
  std::uint32_t most_provided_ = 0;         // at most, so that few are under way
  std::vector<Range> awaited_;              // by a guest: the chains of each lane
  // Before the exchange begins: by sender, chain and round.
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, Buffer> early_portions_;
  std::size_t early_bytes_ = 0;
  Passage passage_;
  bool asks_ = false;                // rank 0 for Go
  bool went_ = false;                // Go was received
  std::uint64_t shared_ = 0;         // ... for shared memory, with this number
  std::set<std::uint32_t> started_;  // rank 0's
  bool in_place_ = false;            // the result is reduced directly in its output
  bool uses_messages_ = false;
  bool awaits_inputs_ = false;  // all of them, before anything is sent
  bool sent_ = false;           // its own pieces, of a collective other than allreduce
  bool ending_ = false;
  // Of each part of the result (a chain, a slice for a guest, a sender's piece): 0 nothing, 1 being
  // put in place, 2 there.
  std::vector<std::uint8_t> have_;
  std::map<std::uint32_t, wire::Payload> values_;
  wire::Payload value_;
  Error error_;
  Effects effects_;
};

}  // namespace moolink::collective
