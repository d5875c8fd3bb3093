#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "collective/compression.h"
#include "collective/kernels.h"
#include "collective/schedule.h"
#include "collective/work.h"

namespace moolink::collective {

// One host's part of one allreduce between hosts: carries out the chains of one lane of its
// schedule (schedule.h). A machine without I/O, used by the member that acts for the host in that
// lane.
//
// How it is driven: provide() each chain's partial sum, in the order of chains() or any other; call
// received() with the messages of other hosts; after each event take_effects(): send what is
// outgoing, run the tasks and call done(), and use the chains that are in place.
class Exchange {
 public:
  struct Plan {
    std::uint32_t hosts = 1;
    std::uint32_t host = 0;
    std::uint32_t lanes = 1;
    std::uint32_t lane = 0;
    std::uint64_t count = 0;  // elements
    tensor::DType dtype = tensor::DType::float32;
    ReduceOp op = ReduceOp::sum;
    double divisor = 1;
    Compression compression = Compression::none;  // of float32 only; not of small payloads
    std::size_t segment_bytes = kSegmentBytes;
  };
  // Elements of one chain for another host: the message's only part.
  struct Outgoing {
    std::uint32_t host = 0;
    std::uint32_t chain = 0;
    std::uint32_t round = 0;
    Buffer elements;
  };
  struct Task {
    std::uint32_t id = 0;
    Work work;
  };
  struct Effects {
    std::vector<Outgoing> outgoing;
    std::vector<Task> tasks;
    std::vector<std::uint32_t> in_place;  // chains whose elements are in the result
  };

  // `result` is of stored elements. `residual` is empty or has as many float32: the compression
  // error of earlier operations in the same plan.
  Exchange(const Plan& plan, MutableBuffer result, MutableBuffer residual, Allocator& memory);

  // In the order in which this host should provide them.
  const std::vector<Chain>& chains() const { return schedule_.chains; }
  const Chain& chain(std::uint32_t id) const { return schedule_.chains[position_[id]]; }
  // Whether it is one of this lane's.
  bool is_chain(std::uint32_t id) const {
    return id < states_.size() && lane_of(id, plan_.hosts, plan_.lanes) == plan_.lane;
  }

  // The host's sum of a chain's elements, of partial_dtype(); read until the exchange is destroyed.
  void provide(std::uint32_t chain, Buffer partial);
  // Returns false if the schedule has no such message or it came before: the sender deviates.
  bool received(std::uint32_t host, std::uint32_t chain, std::uint32_t round, Buffer elements);
  void done(std::uint32_t task);

  Effects take_effects() { return std::exchange(effects_, {}); }
  bool complete() const { return in_place_ == schedule_.chains.size(); }
  // Hosts whose messages the most advanced chains wait for.
  std::set<std::uint32_t> waiting_for() const;

 private:
  struct State {
    std::size_t step = 0;
    bool has_value = false;
    Buffer value;          // the sum so far, or the result
    bool encoded = false;  // in the encoding between hosts
    bool busy = false;     // a task makes the next value
    bool stored = false;
    bool started = false;    // its sum, here
    bool held_back = false;  // would have started here, but must wait
    std::uint32_t tasks = 0;
    std::map<std::uint32_t, Buffer> arrived;  // by round
  };
  // What to do when a task ends.
  struct Pending {
    std::uint32_t chain = 0;
    bool makes_value = false;
    bool stores = false;
    Buffer value;
    bool encoded = false;
  };

  void advance(std::uint32_t id);
  bool do_step(std::uint32_t id, const Chain& chain, State& state);
  bool send(std::uint32_t id, const Chain& chain, State& state, const Step& step);
  void reduce(std::uint32_t id, const Chain& chain, State& state, const Step& step);
  void finish(std::uint32_t id, const Chain& chain, State& state);
  void store(std::uint32_t id, const Chain& chain, State& state, const Step& step);
  void add_task(std::uint32_t id, State& state, Work work, Pending pending);
  SumTask sum_task(std::vector<Buffer> inputs) const;
  void into_result(const Chain& chain, SumTask& task) const;
  MutableBuffer result_of(const Chain& chain) const;
  Buffer encode(const Chain& chain, const Buffer& value, Work& work) const;
  std::size_t travelling_size(const Chain& chain, bool partial) const;
  void note_in_place(std::uint32_t id, State& state);
  bool may_start(std::uint32_t id);
  void came_around();

  Plan plan_;
  Schedule schedule_;
  std::vector<std::size_t> position_;  // of a chain in the schedule, by id
  std::vector<State> states_;          // by id
  MutableBuffer result_;
  MutableBuffer residual_;
  Allocator& memory_;
  std::size_t item_size_;
  std::size_t partial_size_;
  std::uint32_t next_task_ = 0;
  std::map<std::uint32_t, Pending> pending_;
  std::size_t in_place_ = 0;
  // Of the chains whose sums start here: those in transit, and those that wait.
  std::size_t on_their_way_ = 0;
  std::deque<std::uint32_t> held_back_;
  Effects effects_;
};

}  // namespace moolink::collective
