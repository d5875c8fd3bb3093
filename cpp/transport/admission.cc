#include "transport/admission.h"

#include <algorithm>

namespace moolink::transport {

Admission::Answer Admission::admit(Time now, const std::string& source, bool this_host) {
  const auto known = sources_.find(source);
  const std::size_t here = known == sources_.end() ? 0 : known->second.waiting;
  if (!this_host && known != sources_.end() && now < known->second.paused_until) {
    Source& paused = known->second;
    if (now < paused.next_admission) return {};
    paused.next_admission = now + config_.trickle;
  }
  const bool too_many_of_it = !this_host && here >= config_.of_source;
  if (!too_many_of_it && waiting_.size() < config_.waiting) return {true, {}};
  if (waiting_.empty()) return {};
  const auto oldest = oldest_of(too_many_of_it ? source : fullest());
  if (!oldest || now - waiting_.at(*oldest).since < config_.grace) return {};
  return {true, oldest};
}

void Admission::accepted(Time now, wire::ConnectionId id, const std::string& source) {
  Source& from = sources_[source];
  waiting_.emplace(id, Waiting{source, now});
  ++from.waiting;
  from.last = now;
  if (sources_.size() > config_.sources) forget_one();
}

void Admission::authenticated(wire::ConnectionId id) {
  const auto found = waiting_.find(id);
  if (found == waiting_.end()) return;
  Source& source = sources_.at(found->second.source);
  --source.waiting;
  source.failures = 0;
  source.paused_until = Time::min();
  waiting_.erase(found);
}

void Admission::closed(Time now, wire::ConnectionId id) {
  const auto found = waiting_.find(id);
  if (found == waiting_.end()) return;
  Source& source = sources_.at(found->second.source);
  --source.waiting;
  source.last = now;
  ++source.failures;
  if (source.failures > config_.free_failures) {
    const std::size_t doublings =
        std::min<std::size_t>(source.failures - config_.free_failures, 20);
    source.paused_until =
        now + std::min(config_.first_pause * (1 << (doublings - 1)), config_.longest_pause);
  }
  waiting_.erase(found);
}

std::optional<wire::ConnectionId> Admission::oldest_of(const std::string& source) const {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const auto& entry) { return entry.second.source == source; });
  return found == waiting_.end() ? std::nullopt : std::optional(found->first);
}

const std::string& Admission::fullest() const {
  return std::max_element(
             sources_.begin(), sources_.end(),
             [](const auto& a, const auto& b) { return a.second.waiting < b.second.waiting; })
      ->first;
}

// The least recently seen source without a waiting connection.
void Admission::forget_one() {
  auto least = sources_.end();
  for (auto at = sources_.begin(); at != sources_.end(); ++at) {
    if (at->second.waiting != 0) continue;
    if (least == sources_.end() || at->second.last < least->second.last) least = at;
  }
  if (least != sources_.end()) sources_.erase(least);
}

}  // namespace moolink::transport
