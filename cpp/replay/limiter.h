#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/mutant.h"

namespace moolink::replay {

// Reverb's limiter. Its error is inserts * samples_per_insert - samples; an insert must leave it at
// or below max_diff, a sample at or above min_diff. Below min_size items there are no samples, and
// inserts are unrestricted.
struct LimiterOptions {
  double samples_per_insert = 1;
  std::int64_t min_size = 1;
  double min_diff = std::numeric_limits<double>::lowest();
  double max_diff = std::numeric_limits<double>::max();

  bool operator==(const LimiterOptions&) const = default;
};

class Limiter {
 public:
  // Of items; every removal counts as a delete, by any cause.
  struct Counts {
    std::int64_t inserts = 0;
    std::int64_t samples = 0;
    std::int64_t deletes = 0;

    std::int64_t size() const { return inserts - deletes; }
    bool operator==(const Counts&) const = default;
  };

  explicit Limiter(const LimiterOptions& options) : options_(options) {}

  const Counts& counts() const { return counts_; }
  void set_counts(const Counts& counts) { counts_ = counts; }

  bool can_insert() const {
    if (counts_.size() + 1 <= options_.min_size && !mutant("no_free_inserts")) return true;
    const std::int64_t after = counts_.inserts + (mutant("insert_past_the_error") ? 0 : 1);
    const double diff = static_cast<double>(after) * options_.samples_per_insert -
                        static_cast<double>(counts_.samples);
    return diff <= options_.max_diff;
  }
  // How many items may be sampled now, one after the other: at most `wanted`.
  std::int64_t samples_allowed(std::int64_t wanted) const {
    const double room = static_cast<double>(counts_.inserts) * options_.samples_per_insert -
                        static_cast<double>(counts_.samples) - options_.min_diff;
    const double most = std::clamp(std::floor(room) + 1, 0.0, static_cast<double>(wanted));
    auto count = static_cast<std::int64_t>(most);
    // can_sample() decides, however room was rounded.
    while (count > 0 && !can_sample(count)) --count;
    return count;
  }

  void inserted() { ++counts_.inserts; }
  void sampled(std::int64_t count) { counts_.samples += count; }
  void deleted() { ++counts_.deletes; }

 private:
  bool can_sample(std::int64_t count) const {
    if (counts_.size() < options_.min_size && !mutant("sample_below_min_size")) return false;
    const double diff = static_cast<double>(counts_.inserts) * options_.samples_per_insert -
                        static_cast<double>(counts_.samples) -
                        static_cast<double>(mutant("sample_past_the_error") ? count - 1 : count);
    return diff >= options_.min_diff;
  }

  LimiterOptions options_;
  Counts counts_;
};

}  // namespace moolink::replay
