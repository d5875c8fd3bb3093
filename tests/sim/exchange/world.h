#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collective/epoch_members.h"
#include "collective/exchange.h"
#include "collective/messages.h"
#include "common/simulation.h"

namespace moolink::sim {

// Leaders of the lanes of several hosts that exchange the sums of their members, any number of
// each; sums, messages and arithmetic come in any order. Checked: everything ends, no leader sends
// what another does not expect, the result is right, and has the same bits at all hosts.
class ExchangeWorld {
 public:
  ExchangeWorld(std::uint64_t seed, bool print) : simulation_(seed, print) {}

  void run();
  std::uint64_t hash() const { return simulation_.trace.hash(); }

 private:
  struct Leader {
    std::unique_ptr<collective::Exchange> exchange;
    std::uint32_t host = 0;
    std::uint32_t lane = 0;
    std::uint32_t provided = 0;  // chains
    std::size_t results = 0;
    std::vector<collective::Exchange::Task> tasks;
  };
  struct Message {
    std::uint32_t from = 0;  // leaders
    std::uint32_t to = 0;
    collective::Exchange::Outgoing content;
  };

  void draw();
  void draw_roles();
  bool contributes(std::size_t rank) const;
  void draw_inputs();
  collective::Schedule schedule() const;
  std::vector<collective::Range> chains_of(std::uint32_t lane) const;
  MutableBuffer filled(std::size_t bytes);
  void reduce_once();
  bool go_on();
  void provide(Leader& leader);
  void take_effects(std::uint32_t index);
  void deliver(std::size_t index);
  void check_same_bits();
  void check_values(std::size_t times);
  double exact(std::uint64_t element) const;

  Simulation simulation_;
  HeapAllocator heap_;
  collective::OpSpec spec_;
  collective::Hosts hosts_;
  bool beside_ = false;                                // the "hosts" are members of one host
  std::size_t chains_ = 1;                             // of each lane
  bool whole_numbers_ = true;                          // sums are exact in any order
  std::vector<Buffer> inputs_;                         // of each rank
  std::vector<Buffer> sums_;                           // of each host
  std::vector<MutableBuffer> results_;                 // the same
  std::vector<std::vector<MutableBuffer>> residuals_;  // of each host and lane
  std::vector<Leader> leaders_;
  std::vector<Message> under_way_;
  std::vector<double> totals_;  // of the results of several times
};

}  // namespace moolink::sim
