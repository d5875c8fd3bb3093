#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "group/view.h"

namespace moolink::accumulate {

// The epoch that this peer is in, as all parts of its Machine see it: the view, the phase, the
// leader, and whether this peer takes part. Owned by the Machine; EpochChange moves it on, the
// Machine says when the peer is out of the group, and the other parts only read it. Outside of the
// group the last epoch's view and leader stay, for the names in messages and for the number that a
// later epoch must exceed.
class Epoch {
 public:
  // outside: in no view. flushing: FLUSH sent, RESUME awaited. resuming: carries out RESUME and
  // waits for GO. active: rounds are cut.
  enum class Phase : std::uint8_t { outside, flushing, resuming, active };

  explicit Epoch(const Uid& self) : self_(self) {}

  // --- transitions -------------------------------------------------------------------------------
  void enter(group::SharedView view) {
    view_ = std::move(view);
    phase_ = Phase::flushing;
  }
  // `refusal`: why this peer takes no part; empty if it does.
  void resume(std::string refusal) {
    refusal_ = std::move(refusal);
    phase_ = Phase::resuming;
  }
  void activate(const Uid& leader) {
    leader_ = leader;
    phase_ = Phase::active;
  }
  void leave() { phase_ = Phase::outside; }

  // --- the epoch ---------------------------------------------------------------------------------
  Phase phase() const { return phase_; }
  bool is_outside() const { return phase_ == Phase::outside; }
  bool is_active() const { return phase_ == Phase::active; }
  std::uint64_t number() const { return view_->epoch; }
  const group::View& view() const { return *view_; }
  const Uid& self() const { return self_; }
  // Of the last epoch that was active here.
  const Uid& leader() const { return leader_; }
  bool is_leader() const { return is_active() && leader_ == self_; }
  const std::string& refusal() const { return refusal_; }
  bool takes_part() const { return refusal_.empty(); }
  // Rank 0; null if there are only observers, which decide nothing and have the last ranks.
  const group::MemberInfo* coordinator() const;
  bool is_coordinator(const Uid& instance) const {
    return coordinator() != nullptr && coordinator()->instance == instance;
  }
  // Empty for a peer outside the view, of which only the instance matters.
  const std::string& name_of(const Uid& instance) const;
  std::vector<std::string> names_of(const std::vector<Uid>& instances) const;

 private:
  Uid self_;
  Phase phase_ = Phase::outside;
  group::SharedView view_ = group::no_view();
  Uid leader_;
  std::string refusal_;
};

}  // namespace moolink::accumulate
