#include "rpc/dialler.h"

#include <algorithm>

namespace moolink::rpc {

namespace {

// Refusals further apart than this are no series: one of the two peers was stopped in between. It
// is longer than the pause before a dial.
constexpr Duration kBetweenRefusals = seconds(2);

bool is_shared_memory(const std::string& address) { return address.starts_with("shm://"); }

bool is_loopback(const std::string& address) {
  const std::string_view host = host_of(address);
  return !is_shared_memory(address) &&
         (host.starts_with("127.") || host == "[::1]" || host == "localhost");
}

}  // namespace

bool reachable(const std::string& address, bool same_host) {
  return same_host || !(is_shared_memory(address) || is_loopback(address));
}

bool is_of(const std::string& address, wire::PathKind kind) {
  return address.starts_with(std::string(wire::kPathNames[kind]) + "://");
}

std::string_view host_of(std::string_view address) {
  constexpr std::string_view kAfterScheme = "://";
  const std::size_t begin = address.find(kAfterScheme);
  const std::size_t end = address.rfind(':');
  if (begin == std::string_view::npos || end <= begin) return {};
  return address.substr(begin + kAfterScheme.size(), end - begin - kAfterScheme.size());
}

void sort_by_preference(std::vector<std::string>& addresses) {
  std::ranges::stable_sort(addresses, [](const std::string& a, const std::string& b) {
    const auto rank = [](const std::string& address) {
      if (is_shared_memory(address)) return 0;
      // A dial that does not reach the host fails after seconds only.
      if (is_of(address, wire::kBestBetweenHosts)) return 3;
      return is_loopback(address) ? 1 : 2;
    };
    return rank(a) < rank(b);
  });
}

DialTarget& Dialler::add(const std::string& address, Time when) {
  if (DialTarget* known = find(address)) return *known;
  DialTarget target;
  target.number = ++last_number_;
  target.address = address;
  target.pause = first_pause_;
  target.next_try = when;
  return targets_.emplace(address, std::move(target)).first->second;
}

DialTarget* Dialler::find(const std::string& address) {
  const auto found = targets_.find(address);
  return found == targets_.end() ? nullptr : &found->second;
}

DialTarget* Dialler::find(std::uint64_t number) {
  for (auto& [address, target] : targets_) {
    if (target.number == number) return &target;
  }
  return nullptr;
}

DialTarget* Dialler::of_connection(wire::ConnectionId connection) {
  for (auto& [address, target] : targets_) {
    if (target.state == DialTarget::State::open && target.connection == connection) return &target;
  }
  return nullptr;
}

std::size_t Dialler::count_for(const std::string& peer) const {
  return static_cast<std::size_t>(std::ranges::count_if(targets_, [&](const auto& entry) {
    return entry.second.peer == peer && !entry.second.wanted_by_user;
  }));
}

bool Dialler::refused_everywhere(const std::string& address) {
  const DialTarget* target = find(address);
  return target != nullptr && target->wanted_by_user &&
         std::ranges::all_of(targets_, [](const auto& entry) {
           return entry.second.refused || !entry.second.wanted_by_user;
         });
}

void Dialler::leave(DialTarget& target, Time now) {
  target.state = DialTarget::State::idle;
  target.connection = 0;
  target.next_try = now;
}

void Dialler::opened(DialTarget& target, wire::ConnectionId connection) {
  target.state = DialTarget::State::open;
  target.connection = connection;
  target.next_try = kNever;
}

void Dialler::succeeded(DialTarget& target, const Uid& instance) {
  target.instance = instance;
  target.pause = first_pause_;
  target.failures = 0;
  target.last_error.clear();
  target.refused_at = target.refused_since = kNever;
}

Duration Dialler::refused(DialTarget& target, Time now) {
  target.refused = target.error_is_refusal = true;
  if (target.refused_at == kNever || now - target.refused_at > kBetweenRefusals) {
    target.refused_since = now;
  }
  target.refused_at = now;
  return now - target.refused_since;
}

void Dialler::failed(DialTarget& target, Time now) {
  target.state = DialTarget::State::idle;
  target.connection = 0;
  ++target.failures;
  target.next_try = now + target.pause;
  target.pause = std::min(2 * target.pause, last_pause_);
}

}  // namespace moolink::rpc
