#include "replay/limiter.h"

#include <algorithm>
#include <cmath>

namespace moolink::replay {

bool Limiter::can_insert() const {
  if (counts_.size() + 1 <= options_.min_size) return true;
  const double diff = static_cast<double>(counts_.inserts + 1) * options_.samples_per_insert -
                      static_cast<double>(counts_.samples);
  return diff <= options_.max_diff;
}

std::int64_t Limiter::samples_allowed(std::int64_t wanted) const {
  const double room = static_cast<double>(counts_.inserts) * options_.samples_per_insert -
                      static_cast<double>(counts_.samples) - options_.min_diff;
  const double most = std::clamp(std::floor(room) + 1, 0.0, static_cast<double>(wanted));
  auto count = static_cast<std::int64_t>(most);
  // can_sample() decides, however room was rounded.
  while (count > 0 && !can_sample(count)) --count;
  return count;
}

bool Limiter::can_sample(std::int64_t count) const {
  if (counts_.size() < options_.min_size) return false;
  const double diff = static_cast<double>(counts_.inserts) * options_.samples_per_insert -
                      static_cast<double>(counts_.samples) - static_cast<double>(count);
  return diff >= options_.min_diff;
}

}  // namespace moolink::replay
