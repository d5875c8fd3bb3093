#pragma once

// The user of one accumulator: what a learner's loop does with it, with made-up gradients, and the
// checks of all that it is given.

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "accumulate/machine.h"
#include "base/random.h"
#include "base/time.h"
#include "common/registry.h"

namespace moolink::sim {

class Learner {
 public:
  struct Habits {
    bool observer = false;
    std::int64_t most_batch = 4;
    std::uint64_t skip_percent = 10;
    std::uint64_t eager_percent = 70;  // contributes when asked
    std::uint64_t slots = 2;           // results that may wait
    std::uint64_t parallel_gradients = 1;
    std::uint64_t unwritten_percent = 0;  // of the buckets that are offered before they are written
  };

  Learner(Registry& registry, Uid instance, Habits habits, std::uint64_t first_version);

  // One turn of the loop; contributes only if `contributing`, and keeps to its parameters if
  // `calm`.
  void update(Time now, accumulate::Machine& machine, Random& random, bool contributing, bool calm);
  void dropped(const std::vector<std::uint64_t>& k);

  std::uint64_t node() const { return node_; }
  std::uint64_t version() const { return registry_->version(node_); }
  const std::set<std::uint64_t>& dropped() const { return dropped_; }
  // Whether a snapshot replaced a history that the contribution was in by one that it is not in.
  bool was_overruled(std::uint64_t k) const;
  const Uid& instance() const { return instance_; }
  const Habits& habits() const { return habits_; }
  std::uint64_t applied() const { return applied_; }
  std::uint64_t installed() const { return installed_; }
  bool resynced() const { return resynced_; }
  bool withdrew() const { return !withdrawn_.empty(); }
  // Its peer has entered an epoch; its peer knows of a round.
  void entered_epoch() { known_round_ = contributed_ = 0; }
  void knows(std::uint64_t epoch, std::uint64_t round) {
    known_epoch_ = epoch;
    known_round_ = round;
  }
  bool contributed_in_epoch() const { return contributed_ > 0; }

 private:
  wire::Payload make_state() const;
  void install(const accumulate::NewState& state);
  void apply(Time now, accumulate::Machine& machine, const accumulate::Round& round,
             Random& random);
  void contribute(Time now, accumulate::Machine& machine, Random& random);
  void write_on(Time now, accumulate::Machine& machine, Random& random, bool calm);
  void check_withdrawn(const accumulate::RoundRecord& record) const;

  Registry* registry_;
  Uid instance_;
  Habits habits_;
  std::uint64_t node_;
  std::uint64_t next_k_ = 1;
  std::uint64_t applied_ = 0;
  std::uint64_t holding_ = 0;    // a result whose memory the user has taken and not applied yet
  std::uint64_t held_node_ = 0;  // where it leads to
  bool resynced_ = false;        // it has given up its parameters
  std::uint64_t installed_ = 0;
  std::uint64_t known_epoch_ = 0;
  std::uint64_t known_round_ = 0;  // the last one cut in this epoch
  std::uint64_t contributed_ = 0;  // contributions in this epoch
  // An offered bucket that is still being written.
  struct Unwritten {
    std::uint64_t k = 0;
    MutableBuffer bucket;
    Buffer content;
    std::shared_ptr<Progress> progress;
  };
  std::optional<Unwritten> unwritten_;
  std::set<std::uint64_t> withdrawn_;
  std::set<std::uint64_t> dropped_;
  std::vector<std::uint64_t> left_nodes_;  // where it stood when a snapshot came
};

}  // namespace moolink::sim
