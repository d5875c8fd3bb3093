#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "accumulate/awake_clock.h"
#include "accumulate/config.h"
#include "accumulate/outbox.h"

namespace moolink::accumulate {

// The settings of the rounds: the user's own, with which this peer leads, and the leader's, which
// count for all. Peers change their settings one after the other, and the leader's hold meanwhile;
// a lasting difference is a mistake, which would show when another peer leads: then this peer has
// Failed until they agree. A setting that was never set differs from none. Owned by the Machine;
// current() is what counts at the moment.
class RoundSettings {
 public:
  RoundSettings(const Config& config, const Epoch& epoch, const AwakeClock& clock, Outbox& outbox)
      : config_(config),
        epoch_(epoch),
        clock_(clock),
        outbox_(outbox),
        virtual_batch_size_(config.virtual_batch_size),
        parallel_gradients_(config.parallel_gradients) {}

  // Both throw Exception{invalid_argument}. A leader tells all members.
  void set_virtual_batch_size(std::int64_t size);
  void set_parallel_gradients(std::uint32_t rounds);
  void announce() const { outbox_.broadcast(own()); }
  // False if they are not the leader's, or no settings that a leader can have.
  bool learn(const Uid& from, const Settings& settings);
  void leave_epoch() { leaders_.reset(); }
  void watch();

  Settings own() const;  // with which this peer leads, or would
  Settings current() const { return epoch_.is_leader() || !leaders_ ? own() : *leaders_; }
  bool is_watching() const { return differs_since_ != kNever && !has_failed_; }

 private:
  std::string difference(const Settings& leaders) const;

  const Config& config_;
  const Epoch& epoch_;
  const AwakeClock& clock_;
  Outbox& outbox_;
  std::int64_t virtual_batch_size_;  // 0: not set
  std::uint32_t parallel_gradients_;
  std::optional<Settings> leaders_;  // of the active epoch's leader
  Time differs_since_ = kNever;      // by clock_
  bool has_failed_ = false;          // the user got an error
};

}  // namespace moolink::accumulate
