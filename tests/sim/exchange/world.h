#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collective/hierarchy.h"
#include "common/simulation.h"

namespace moolink::sim {

// Members of several hosts that reduce together, any number of hosts and members; messages and
// arithmetic are done in any order. Checked: everything ends, nobody sends what another does not
// expect, the result is right, and has the same bits at all members.
class ExchangeWorld {
 public:
  ExchangeWorld(std::uint64_t seed, bool print) : simulation_(seed, print) {}

  void run();
  std::uint64_t hash() const { return simulation_.trace.hash(); }

 private:
  struct Member {
    std::unique_ptr<collective::HierarchicalReduce> machine;
    MutableBuffer result;
    MutableBuffer residual;
    bool began = false;
    std::vector<collective::Exchange::Task> tasks;
  };
  struct Message {
    std::uint32_t from = 0;
    std::uint32_t to = 0;
    collective::Portion portion;
    std::vector<Buffer> parts;
  };

  void draw();
  void draw_roles();
  bool contributes(std::size_t rank) const;
  void draw_inputs();
  void reduce_once();
  bool go_on();
  void take_effects(std::uint32_t rank);
  void deliver(std::size_t index);
  void check_same_bits();
  void check_values(std::size_t times);
  double exact(std::uint64_t element) const;

  Simulation simulation_;
  HeapAllocator heap_;
  collective::OpSpec spec_;
  collective::Hosts hosts_;
  std::size_t segment_bytes_ = collective::kSegmentBytes;
  bool whole_numbers_ = true;  // sums are exact in any order
  std::vector<Buffer> inputs_;
  std::vector<Member> members_;
  std::vector<Message> under_way_;
  std::vector<double> totals_;  // of the results of several times
};

}  // namespace moolink::sim
