#pragma once

#include <cstdint>
#include <limits>

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

  bool can_insert() const;
  // How many items may be sampled now, one after the other: at most `wanted`.
  std::int64_t samples_allowed(std::int64_t wanted) const;

  void inserted() { ++counts_.inserts; }
  void sampled(std::int64_t count) { counts_.samples += count; }
  void deleted() { ++counts_.deletes; }

 private:
  bool can_sample(std::int64_t count) const;

  LimiterOptions options_;
  Counts counts_;
};

}  // namespace moolink::replay
