#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "accumulate/awake_clock.h"
#include "accumulate/config.h"
#include "accumulate/leader.h"
#include "accumulate/outbox.h"

namespace moolink::accumulate {

// A leader's watch over the members that hold up the group. A member whose result slots are full
// and that has applied nothing for too long becomes a newcomer: a view is asked for, and FLUSH
// names the member. Not if its HAVE may have been lost with a session: then another epoch begins,
// with the rounds of each member. Any member may cause a reduction that does not end: another epoch
// finds the members that answer, and no member loses its state.
//
// Time in which this process was suspended is held against no member. Part of Leadership.
class MemberWatch {
 public:
  MemberWatch(const Config& config, const Epoch& epoch, const AwakeClock& clock, Outbox& outbox)
      : config_(config), epoch_(epoch), clock_(clock), outbox_(outbox) {}

  void leave_epoch();
  void activate();
  void session_lost(const Uid& instance);
  void stable_moved() { lagging_since_ = kNever; }
  void watch(const Leader& leader, std::int64_t virtual_batch_size);

  bool is_watching() const { return !blocking_.empty() || lagging_since_ != kNever; }
  void add_facts(Flush& flush) const;

 private:
  struct Blocking {
    Time since;
    std::uint64_t delivered = 0;
  };

  void watch_blocking(const Leader& leader, std::int64_t virtual_batch_size);
  void watch_lagging(const Leader& leader);
  void demote(const Uid& instance);

  const Config& config_;
  const Epoch& epoch_;
  const AwakeClock& clock_;
  Outbox& outbox_;
  // Times are by clock_.
  std::map<Uid, Blocking> blocking_;  // members whose result slots are full
  Time lagging_since_ = kNever;       // a member lacks the oldest round
  std::set<Uid> sessions_lost_;       // in this epoch
  // Until the next epoch is active: whom this peer as leader wants to be newcomers.
  std::set<Uid> demoted_;
  bool is_stalled_ = false;  // its own user held up the group
};

}  // namespace moolink::accumulate
