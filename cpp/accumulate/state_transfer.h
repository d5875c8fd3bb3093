#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "accumulate/awake_clock.h"
#include "accumulate/ledger.h"
#include "accumulate/model_state.h"
#include "accumulate/snapshot_exchange.h"

namespace moolink::accumulate {

// A state that came to this peer, for the user to install.
struct NewState {
  std::uint64_t number = 0;  // counts the states that came to this peer
  std::uint64_t version = 0;
  wire::Payload state;
};

// This peer's way to the group's state: it asks the leader once its user is there, is promised a
// snapshot, fetches it and shows it to the user, who installs or refuses it; the results after the
// snapshot's version are kept in the ledger meanwhile. It starts over if no member hands the
// snapshot on, if too many results wait, or if the user wants another state (resync, refusal). In a
// change of epoch it only fetches: the facts in this member's FLUSH must stay true until that is
// over, or the member may become leader of a state that it has just given up. Owned by the Machine.
class StateTransfer {
 public:
  StateTransfer(const Config& config, const Epoch& epoch, const AwakeClock& clock, Ledger& ledger,
                ModelState& model, SnapshotExchange& snapshots, Outbox& outbox)
      : config_(config),
        epoch_(epoch),
        clock_(clock),
        ledger_(ledger),
        model_(model),
        snapshots_(snapshots),
        outbox_(outbox) {}

  // --- the user; as of Machine. False: no effect -------------------------------------------------
  void user_active() { is_user_present_ = true; }
  bool resync();
  bool installed(std::uint64_t number);
  bool refuse(std::uint64_t number);
  std::optional<NewState> new_state() const { return is_refused_ ? std::nullopt : new_state_; }
  bool has_new_state() const { return new_state_ && !is_refused_; }

  // --- epochs ------------------------------------------------------------------------------------
  void enter_epoch() { has_installed_since_flush_ = false; }
  void activate();
  // This peer's contributions and promised snapshots belong to a history that it left, and the
  // group is at `round`. Its parameters stay as they are until a snapshot replaces them.
  void leave_history(std::uint64_t round);
  // For FLUSH: a refused state is none.
  StateStatus status() const { return is_refused_ ? StateStatus::stateless : model_.status(); }
  bool has_installed_since_flush() const { return has_installed_since_flush_; }
  bool had_state() const { return states_ > 0; }

  // --- messages ----------------------------------------------------------------------------------
  void promised(const Uid& from, const SnapshotId& id);
  void ready(Time now, const Uid& from, const SnapshotReady& ready);
  void received(Time now, const Uid& from, const Outbox::SnapshotMessage& message,
                const std::vector<Buffer>& parts) {
    advance(snapshots_.received(now, from, message, parts));
  }

  // --- due work: in an active epoch, but for watch_fetch() ---------------------------------------
  void start_over_when_wanted();
  void bound_backlog();
  void request_state();
  void watch_fetch(Time now) { advance(snapshots_.watch(now)); }

 private:
  void advance(bool has_parent);
  void start_over(const std::string& why);
  void resync_when_due();
  void drop_refused_state();
  void drop_new_state();

  const Config& config_;
  const Epoch& epoch_;
  const AwakeClock& clock_;
  Ledger& ledger_;
  ModelState& model_;
  SnapshotExchange& snapshots_;
  Outbox& outbox_;
  bool is_user_present_ = false;
  bool is_requested_ = false;
  bool is_resync_due_ = false;  // the user wants another state in place of its own
  std::optional<NewState> new_state_;
  std::uint64_t states_ = 0;
  bool is_refused_ = false;  // the user refused new_state_
  bool has_installed_since_flush_ = false;
  Duration ask_pause_{};  // before it asks for another one
  Time ask_again_{};      // by clock_
  Time successor_at_{};   // by clock_: when it asks to stop leading
};

}  // namespace moolink::accumulate
