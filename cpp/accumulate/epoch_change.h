#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "accumulate/awake_clock.h"
#include "accumulate/config.h"
#include "accumulate/decision.h"
#include "accumulate/outbox.h"

namespace moolink::accumulate {

// The way from a view to an active epoch: each member sends FLUSH with its facts, the coordinator
// decides from them and sends RESUME, each member carries that out and sends READY, and the
// coordinator sends GO. It moves the Epoch on, watches for members that do not answer, and keeps
// the part of this peer's history that the next decision needs. The facts themselves, and what
// RESUME says about rounds and states, are for the Machine, which owns this, to collect and carry
// out: it calls carry_out() when accepts() allows, ready() when the rounds are here, and activate()
// at GO. A view that comes meanwhile begins the change anew with enter().
class EpochChange {
 public:
  EpochChange(const Config& config, const AwakeClock& clock, Epoch& epoch, Outbox& outbox)
      : config_(config), clock_(clock), epoch_(epoch), outbox_(outbox) {}

  // --- the member's way --------------------------------------------------------------------------
  void enter(group::SharedView view);
  void add_facts(Flush& flush) const;
  void flush(Flush facts);  // to the coordinator, which there must be
  bool is_flush_due() const;
  // Whether RESUME is of the coordinator, awaited and possible at a member that has all results up
  // to `have`.
  bool accepts(const Uid& from, const Resume& resume, std::uint64_t have) const;
  void carry_out(const Resume& resume, const MemberStatus& mine);
  void found_history() { founded_ = epoch_.number(); }
  void leave_history() { founded_ = 0; }
  void progressed() { progress_ = clock_.now(); }
  // RESUME is carried out, and every round that stands is here.
  void ready();
  bool is_ready() const { return is_ready_; }
  bool is_go(const Uid& from) const {
    return epoch_.phase() == Epoch::Phase::resuming && epoch_.is_coordinator(from);
  }
  void activate();
  // What is carried out, from carry_out() on.
  const Resume& resume() const { return *resume_; }
  // The members that take part.
  collective::SharedMembers members() const;

  // --- the coordinator ---------------------------------------------------------------------------
  void member_flushed(const Uid& from, const Flush& flush);
  void member_ready(const Uid& from);

  // --- members that do not answer ----------------------------------------------------------------
  void watch();
  std::vector<Uid> missing() const;
  std::string explain() const;  // human-readable: the cause of the wait

 private:
  bool coordinates() const { return epoch_.is_coordinator(epoch_.self()); }
  const char* fault_of(const Resume& resume, std::uint64_t have) const;

  const Config& config_;
  const AwakeClock& clock_;
  Epoch& epoch_;
  Outbox& outbox_;
  // Times are by clock_.
  Time flush_again_{};
  std::optional<Resume> resume_;
  bool is_ready_ = false;
  Time progress_{};

  // At the coordinator.
  std::map<Uid, Flush> flushes_;
  std::optional<Decision> decision_;
  std::set<Uid> ready_;
  std::map<Uid, Time> late_;  // members that FLUSH after the decision
  bool go_sent_ = false;

  // The history, as in Flush.
  Uid lineage_;
  std::uint64_t applied_ = 0;
  Uid applied_lineage_;
  std::uint64_t active_ = 0;
  std::uint64_t founded_ = 0;
};

}  // namespace moolink::accumulate
