#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "accumulate/ledger.h"
#include "accumulate/member_watch.h"
#include "accumulate/model_state.h"
#include "accumulate/round_settings.h"
#include "accumulate/snapshot_exchange.h"

namespace moolink::accumulate {

// What a peer does as leader of an active epoch, and what it knows from having been one until the
// next epoch is active. It cuts rounds and tells all members what is stable, watches members that
// hold up the group, promises snapshots, and takes them of its user's state. At a peer that does
// not lead, there is no Leader here, and messages have no effect. Owned by the Machine, which calls
// lead() after each event of an active epoch and ends the leadership with leave_epoch().
class Leadership {
 public:
  Leadership(const Config& config, const Epoch& epoch, const AwakeClock& clock,
             const RoundSettings& settings, const Ledger& ledger, const ModelState& model,
             SnapshotExchange& snapshots, Outbox& outbox)
      : config_(config),
        epoch_(epoch),
        settings_(settings),
        ledger_(ledger),
        model_(model),
        snapshots_(snapshots),
        outbox_(outbox),
        watch_(config, epoch, clock, outbox) {}

  // --- epochs ------------------------------------------------------------------------------------
  void leave_epoch();
  void activate(const Resume& resume);
  void add_facts(Flush& flush) const;
  void session_lost(const Uid& instance) { watch_.session_lost(instance); }
  // All members of the epoch have attached its shared segment: the reductions of rounds that are
  // cut from now on are assigned to it.
  void shared_ready(std::uint64_t epoch) { shared_epoch_ = epoch; }

  // --- messages and settings ---------------------------------------------------------------------
  void offer(const Uid& from, const Offer& offer) {
    if (leader_) leader_->offer(from, offer);
  }
  void have(const Uid& from, const Have& have) {
    if (leader_) leader_->have(from, have);
  }
  void checksum(const Uid& from, const Checksum& checksum);
  void request_state(Time now, const Uid& from);
  void snapshot_complete(const Uid& from, const SnapshotId& id);
  void set_parallel_gradients(std::uint32_t rounds) {
    if (leader_) leader_->set_parallel_gradients(rounds);
  }

  // --- due work ----------------------------------------------------------------------------------
  // `next`: the epoch of a soft view that waits for a boundary between two rounds; 0: none.
  void lead(Time now, std::uint64_t next);
  bool is_watching() const { return watch_.is_watching(); }
  Time next_deadline() const { return leader_ ? leader_->promise_due().value_or(kNever) : kNever; }

  // --- the user ----------------------------------------------------------------------------------
  std::optional<std::uint64_t> wants_state() const { return wants_state_; }
  bool set_state(wire::Payload state);  // false: it is not wanted any more
  // The user's state is wanted, or will be, before the next round is applied: a promised snapshot
  // is of this version.
  bool holds_results_back() const;
  // The members that the next round waits for.
  std::vector<Uid> waiting_for() const;
  // Human-readable: the cause of the wait; how much of the next round's batch is here.
  std::string explain() const;
  std::string gathered() const;

 private:
  void cut_rounds();
  void promise_snapshot(Time now, bool is_boundary_near);
  bool is_state_promised() const;

  const Config& config_;
  const Epoch& epoch_;
  const RoundSettings& settings_;
  const Ledger& ledger_;
  const ModelState& model_;
  SnapshotExchange& snapshots_;
  Outbox& outbox_;
  MemberWatch watch_;
  std::optional<Leader> leader_;
  std::uint64_t announced_stable_ = 0;
  bool is_boundary_announced_ = false;
  std::uint64_t shared_epoch_ = 0;  // the epoch whose segment all members have
  std::uint64_t shared_cuts_ = 0;   // of the active epoch
  std::optional<std::uint64_t> wants_state_;
  // Until the next epoch is active.
  bool has_led_ = false;
  std::vector<Contribution> queued_;  // in no round
};

}  // namespace moolink::accumulate
