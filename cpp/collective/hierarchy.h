#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/uid.h"
#include "collective/exchange.h"
#include "collective/messages.h"
#include "collective/work.h"

namespace moolink::collective {

// The ranks that share a host. Hosts are numbered in the order of their lowest ranks. Each has as
// many leaders as the host with the fewest possible ones has of them: one for each lane.
struct Hosts {
  std::vector<std::uint32_t> of;                  // the host of each rank
  std::vector<std::vector<std::uint32_t>> ranks;  // of each host: its leaders, then the others
  std::uint32_t lanes = 1;

  std::uint32_t count() const { return static_cast<std::uint32_t>(ranks.size()); }
  std::uint32_t leader(std::uint32_t host, std::uint32_t lane) const { return ranks[host][lane]; }
  // The lane of this rank; none if it leads none.
  std::optional<std::uint32_t> lane(std::uint32_t rank) const;
};
// By the host key of each rank; a rank without a key is alone.
Hosts hosts_of(const std::vector<Uid>& keys);
// Whether all ranks have one host key.
bool share_a_host(const std::vector<Uid>& keys);
// For an operation with only `reducers` as reducers: only they lead hosts. The ranks of a host
// without reducers count as other hosts' members, in turn.
Hosts hosts_led_by(const std::vector<std::uint32_t>& reducers, const Hosts& hosts);

// One member's part of an allreduce over several hosts:
//   contributors send each chain of their inputs to its leader on their host       (Portion)
//   leaders sum them in rank order, and exchange the sums within their lane        (Portion)
//   leaders pass each chain on to their host's members when it is in place         (Portion)
// Chains follow one another: all three steps overlap. A leader of one lane is an ordinary member in
// the others. How a host's members reduce among themselves is private to this class; Exchange knows
// only hosts.
class HierarchicalReduce {
 public:
  struct Place {
    std::uint32_t rank = 0;
    const Hosts* hosts = nullptr;               // must outlive this
    std::size_t segment_bytes = kSegmentBytes;  // the same at all members
  };
  struct Outgoing {
    std::uint32_t to = 0;  // rank
    Portion portion;
    std::vector<Buffer> parts;
  };
  struct Effects {
    std::vector<Outgoing> outgoing;
    std::vector<Exchange::Task> tasks;
  };

  // `input` is sent until the result has arrived, and never written; `result` may still be sent
  // then. A rank that is no contributor has no input. `residual` is a leader's: see Exchange.
  HierarchicalReduce(const OpSpec& spec, const Place& place, Buffer input, MutableBuffer result,
                     MutableBuffer residual, Allocator& memory);

  void begin();
  // Returns false for a message not expected from this rank. The specs have been compared.
  bool received(std::uint32_t from, const Portion& portion, const std::vector<Buffer>& parts);
  void done(std::uint32_t task);

  Effects take_effects() { return std::exchange(effects_, {}); }
  bool complete() const;
  std::set<std::uint32_t> waiting_for() const;  // ranks

 private:
  bool leads(std::uint32_t chain) const { return exchange_ && exchange_->is_chain(chain); }
  std::uint32_t leader(std::uint32_t host, std::uint32_t chain) const;
  const std::vector<std::uint32_t>& neighbours() const { return hosts_.ranks[host_]; }
  Buffer input_of(const Chain& chain) const;
  MutableBuffer result_of(const Chain& chain) const;
  void provide_own(const Chain& chain);
  Buffer zeros(const Chain& chain);
  void local_input(std::uint32_t from, std::uint32_t chain, Buffer elements);
  void take_exchange_effects();
  void send(std::uint32_t to, std::uint32_t chain, std::uint32_t round, Buffer elements);

  const OpSpec& spec_;
  const Hosts& hosts_;
  const std::uint32_t rank_;
  const std::uint32_t host_;
  Buffer input_;
  MutableBuffer result_;
  Allocator& memory_;
  std::size_t item_size_;
  std::vector<std::uint32_t> contributors_;  // of this host, rising
  bool contributes_ = false;
  Buffer zeros_;               // a chain of a host without contributors
  std::vector<Chain> chains_;  // of all lanes, by id: the ranges only
  std::optional<Exchange> exchange_;
  std::map<std::uint32_t, std::map<std::uint32_t, Buffer>> inputs_;  // by chain and rank
  std::map<std::uint32_t, std::pair<std::uint32_t, Buffer>> sums_;   // tasks: chain, partial
  std::set<std::uint32_t> lacking_;                // chains that others lead, without a result
  std::map<std::uint32_t, std::uint32_t> copies_;  // tasks that store one of those: chain
  std::uint32_t next_task_ = 0;
  Effects effects_;
};

}  // namespace moolink::collective
