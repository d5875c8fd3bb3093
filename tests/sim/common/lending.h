#pragma once

// Memory that simulated processes lend one another. It is written over when its lender has it back,
// as the lender's user would: a borrower that still has a claim to it must not find that.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "base/buffer.h"
#include "common/message_bytes.h"
#include "common/program.h"
#include "common/simulation.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::sim {

class LendingMemory {
 public:
  explicit LendingMemory(Simulation& simulation) : state_(std::make_shared<State>(simulation)) {}
  ~LendingMemory() { state_->over = true; }
  LendingMemory(const LendingMemory&) = delete;
  LendingMemory& operator=(const LendingMemory&) = delete;

  // These bytes in memory that is lent, in a segment of its own. `claim`: whether the one that it
  // is lent to may still count on it.
  std::pair<Buffer, wire::LentPart> lend(const Buffer& bytes, std::uint32_t part,
                                         std::function<bool()> claim) {
    const std::uint64_t segment = ++state_->last;
    Record& record = state_->records[segment];
    record.memory = HeapAllocator().allocate(bytes.size());
    std::memcpy(record.memory.data(), bytes.data(), bytes.size());
    record.expected = bytes;
    record.claim = std::move(claim);
    ++coverage["parts lent"];
    std::shared_ptr<void> owner(record.memory.data(), [state = state_, segment](void*) {
      if (!state->over) release(*state, segment);
    });
    return {Buffer(std::move(owner), record.memory.data(), bytes.size()), {part, segment, 0}};
  }

  // The lender's bytes as its peer maps them; `ended` is called when the last reference has gone.
  Buffer borrow(const wire::LoanPlace& place, std::function<void()> ended) {
    const auto found = state_->records.find(place.segment);
    require(found != state_->records.end(), "a loan lies in memory that was not lent");
    Record& record = found->second;
    require(place.offset == 0 && place.bytes == record.memory.size(), "a loan at a wrong place");
    ++record.holders;
    ++coverage["loans mapped"];
    std::shared_ptr<void> owner(
        record.memory.data(), [state = state_, segment = place.segment, ended](void*) {
          if (state->over) return;
          give_up(*state, segment);
          state->simulation.at(state->simulation.now(), ended);  // a deleter must not throw
        });
    return {std::move(owner), record.memory.data(), record.memory.size()};
  }

  // Whether nothing is lent any more of what this picks.
  bool all_back(const std::function<bool(std::uint64_t segment)>& picked) const {
    for (const auto& [segment, record] : state_->records) {
      if (!record.released && picked(segment)) return false;
    }
    return true;
  }

 private:
  struct Record {
    MutableBuffer memory;
    Buffer expected;
    std::function<bool()> claim;
    int holders = 0;
    bool released = false;
  };
  struct State {
    explicit State(Simulation& of) : simulation(of) {}
    Simulation& simulation;
    bool over = false;
    std::uint64_t last = 0;
    std::map<std::uint64_t, Record> records;
  };

  static void release(State& state, std::uint64_t segment) {
    Record& record = state.records.at(segment);
    record.released = true;
    const bool held = record.holders > 0;
    std::memset(record.memory.data(), 0xdd, record.memory.size());
    state.simulation.at(state.simulation.now(), [&record, held] {
      require(!held || !record.claim(), "lent memory came back while its borrower held it");
    });
  }

  static void give_up(State& state, std::uint64_t segment) {
    Record& record = state.records.at(segment);
    --record.holders;
    const bool intact = same_bytes(record.memory, record.expected);
    state.simulation.at(state.simulation.now(), [&record, intact] {
      require(intact || !record.claim(), "lent memory was written while its borrower held it");
    });
  }

  std::shared_ptr<State> state_;
};

}  // namespace moolink::sim
