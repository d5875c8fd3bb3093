#include "transport/door.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace moolink::transport {

Error cannot_accept_error(int error_number) {
  std::string text =
      std::string("a connection waits that cannot be accepted: ") + std::strerror(error_number);
  if (error_number == EMFILE) text += "; allow this process more of them (see ulimit -n)";
  return make_error(ErrorCode::error, text);
}

Door::Answer Door::knock(Time now, const std::string& source, bool this_host) {
  const auto known = sources_.find(source);
  const std::size_t here = known == sources_.end() ? 0 : known->second.strangers;
  if (!this_host && known != sources_.end() && now < known->second.shut_until) {
    Source& shut = known->second;
    if (now < shut.let_in_at) return {};
    shut.let_in_at = now + config_.trickle;
  }
  const bool too_many_of_it = !this_host && here >= config_.of_source;
  if (!too_many_of_it && strangers_.size() < config_.strangers) return {true, {}};
  if (strangers_.empty()) return {};
  const auto oldest = oldest_of(too_many_of_it ? source : fullest());
  if (!oldest || now - strangers_.at(*oldest).since < config_.grace) return {};
  return {true, oldest};
}

void Door::entered(Time now, Guest guest, const std::string& source) {
  Source& from = sources_[source];
  strangers_.emplace(guest, Stranger{source, now});
  ++from.strangers;
  from.last = now;
  if (sources_.size() > config_.sources) forget_one();
}

void Door::proven(Guest guest) {
  const auto found = strangers_.find(guest);
  if (found == strangers_.end()) return;
  Source& source = sources_.at(found->second.source);
  --source.strangers;
  source.failures = 0;
  source.shut_until = Time::min();
  strangers_.erase(found);
}

void Door::left(Time now, Guest guest) {
  const auto found = strangers_.find(guest);
  if (found == strangers_.end()) return;
  Source& source = sources_.at(found->second.source);
  --source.strangers;
  source.last = now;
  ++source.failures;
  if (source.failures > config_.free_failures) {
    const std::size_t doublings =
        std::min<std::size_t>(source.failures - config_.free_failures, 20);
    source.shut_until =
        now + std::min(config_.first_pause * (1 << (doublings - 1)), config_.longest_pause);
  }
  strangers_.erase(found);
}

std::optional<Door::Guest> Door::oldest_of(const std::string& source) const {
  const auto found = std::find_if(strangers_.begin(), strangers_.end(),
                                  [&](const auto& entry) { return entry.second.source == source; });
  return found == strangers_.end() ? std::nullopt : std::optional(found->first);
}

const std::string& Door::fullest() const {
  return std::max_element(
             sources_.begin(), sources_.end(),
             [](const auto& a, const auto& b) { return a.second.strangers < b.second.strangers; })
      ->first;
}

// Of those without a stranger the one that was heard least lately.
void Door::forget_one() {
  auto least = sources_.end();
  for (auto at = sources_.begin(); at != sources_.end(); ++at) {
    if (at->second.strangers != 0) continue;
    if (least == sources_.end() || at->second.last < least->second.last) least = at;
  }
  if (least != sources_.end()) sources_.erase(least);
}

}  // namespace moolink::transport
