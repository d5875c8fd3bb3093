#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "collective/compression.h"
#include "collective/kernels.h"
#include "collective/schedule.h"
#include "collective/work.h"

namespace moolink::collective {

// One host's part of an allreduce between hosts: carries out its chains (schedule.h). A machine
// without I/O, used by the member that acts for the host in one lane. Without shared memory, each
// member is a host.
//
// How it is driven: provide() each chain's partial sum; call received() with the messages of other
// hosts; after each event take_effects(): send the outgoing messages, run the tasks and call
// done(), and use the results.
class Exchange {
 public:
  struct Plan {
    std::uint32_t hosts = 1;
    std::uint32_t host = 0;
    std::vector<Range> chains;  // the elements of each; the same at all hosts
    Schedule schedule = Schedule::tree;
    std::uint32_t first = 0;  // the root of the first chain
    tensor::DType dtype = tensor::DType::float32;
    ReduceOp op = ReduceOp::sum;
    double divisor = 1;
    Compression compression = Compression::none;  // of float32 only; not if it is small
    // The partial sums are a user's memory, which is read only until the results are here or the
    // operation fails: what is sent is a copy.
    bool lent = false;
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
  struct Result {
    std::uint32_t chain = 0;
    Buffer elements;  // as stored; it may still be sent to others
  };
  struct Effects {
    std::vector<Outgoing> outgoing;
    std::vector<Task> tasks;
    std::vector<Result> results;
  };

  // `result` is empty or has the elements of all chains: the results are written there, else into
  // new memory. `residual` is empty or has as many float32: the compression errors of earlier
  // operations of the name.
  Exchange(Plan plan, MutableBuffer result, MutableBuffer residual, Allocator& memory);

  // The host's sum of a chain's elements, of partial_dtype(). Others read it until they have
  // their results, unless it is lent.
  void provide(std::uint32_t chain, Buffer partial);
  // Returns false if the schedule has no such message or it came before: the sender deviates.
  bool received(std::uint32_t host, std::uint32_t chain, std::uint32_t round, Buffer elements);
  void done(std::uint32_t task);

  Effects take_effects() { return std::exchange(effects_, {}); }
  const Range& range(std::uint32_t chain) const { return chains_[chain].range; }
  // The hosts from which some chain lacks its next message.
  std::set<std::uint32_t> waiting_for() const;

 private:
  struct Chain {
    Range range;
    std::vector<Step> steps;
    std::size_t step = 0;
    std::optional<Buffer> value;  // the sum so far, or the result
    bool encoded = false;         // in the encoding between hosts
    bool lent = false;            // it is this host's own, as provided
    bool busy = false;            // a task makes the next value
    std::optional<Buffer> result;
    std::uint32_t tasks = 0;
    std::map<std::uint32_t, Buffer> arrived;  // by round
  };
  // The work when a task ends.
  struct Pending {
    std::uint32_t chain = 0;
    std::optional<Buffer> value;  // the next one
    bool encoded = false;
    std::optional<Buffer> result;
  };

  void advance(std::uint32_t id);
  bool do_step(std::uint32_t id, Chain& chain);
  bool send(std::uint32_t id, Chain& chain, const Step& step);
  void reduce(std::uint32_t id, Chain& chain, const Step& step);
  void finish(std::uint32_t id, Chain& chain);
  void store(std::uint32_t id, Chain& chain, const Step& step);
  void add_task(Chain& chain, Work work, Pending pending);
  SumTask sum_task(std::vector<Buffer> inputs) const;
  void make_final(const Chain& chain, SumTask& task) const;
  MutableBuffer result_of(const Chain& chain) const;
  Buffer encode(const Chain& chain, const Buffer& value, Work& work) const;
  std::size_t travelling_size(const Chain& chain, bool partial) const;
  bool compresses() const { return plan_.compression != Compression::none; }

  Plan plan_;
  std::vector<Chain> chains_;
  MutableBuffer result_;
  MutableBuffer residual_;
  Allocator& memory_;
  std::size_t item_size_;
  std::size_t partial_size_;
  std::uint32_t next_task_ = 0;
  std::map<std::uint32_t, Pending> pending_;
  Effects effects_;
};

}  // namespace moolink::collective
