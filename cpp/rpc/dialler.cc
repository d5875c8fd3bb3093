#include "rpc/dialler.h"

#include <algorithm>
#include <utility>

#include "rpc/addresses.h"

namespace moolink::rpc {

namespace {

// Refusals further apart than this are no series: one of the two peers was stopped in between. It
// is longer than the pause before a dial.
constexpr Duration kBetweenRefusals = seconds(2);
constexpr int kBetterPathTries = 3;
constexpr std::size_t kTriedAddresses = 64;  // remembered for one peer
constexpr std::size_t kCandidates = 256;     // addresses tried for one name at a time

// Whether a failed dial is repeated without limit: the best path between hosts, if it has worked,
// works again once its network is back.
bool comes_back(const DialTarget& target) {
  return is_of(target.address, wire::kBestBetweenHosts) && !target.instance.empty();
}

}  // namespace

DialTarget& Dialler::add(const std::string& address, Time when) {
  if (DialTarget* known = find(address)) return *known;
  DialTarget target;
  target.number = ++last_number_;
  target.address = address;
  target.pause = shared_.config.redial_first;
  target.next_try = when;
  return targets_.emplace(address, std::move(target)).first->second;
}

void Dialler::connect(Time now, const std::string& address) {
  DialTarget& target = add(address, now);
  target.wanted_by_user = true;
  arm(target);
}

void Dialler::add_target(Time now, const std::string& address, const std::string& name,
                         const Uid& of, Duration delay, bool better_path) {
  const std::vector<std::string>& own = shared_.addresses;
  if (shared_.closing || std::ranges::find(own, address) != own.end()) return;
  DialTarget& target = add(address, now + delay);
  if (target.state != DialTarget::State::idle) {  // begun for another reason
    target.better_path = target.better_path || better_path;
    return;
  }
  if (!target.wanted_by_user) {
    target.peer = name;
    target.of = of;
  }
  target.better_path = better_path;
  arm(target);
}

void Dialler::dial_found(Time now, const std::string& name,
                         const std::vector<std::string>& candidates) {
  Duration delay{};
  // Answering peers may invent any number of addresses.
  auto tried = std::ranges::count_if(targets_, [&](const auto& entry) {
    return entry.second.peer == name && !entry.second.wanted_by_user;
  });
  for (const std::string& address : candidates) {
    if (find(address) == nullptr && std::cmp_greater(++tried, kCandidates)) return;
    add_target(now, address, name, {}, delay, false);
    delay += shared_.config.dial_stagger;
  }
}

std::vector<std::string> Dialler::dialable(std::vector<std::string> candidates,
                                           bool same_host) const {
  std::erase_if(candidates, [&](const std::string& address) {
    return !reachable(address, same_host) ||
           std::ranges::none_of(shared_.config.paths,
                                [&](wire::PathKind kind) { return is_of(address, kind); });
  });
  sort_by_preference(candidates);
  return candidates;
}

// Between hosts, dials the host address by which the peer was reached, if the peer announced it:
// dials of other addresses may fail, and only after a time-out.
void Dialler::dial_better_path(Time now, const Peer& peer) {
  const bool same_host = peer.host_key == shared_.config.host_key;
  std::vector<std::string> better = dialable(peer.addresses, same_host);
  std::erase_if(better,
                [&](const auto& address) { return !is_of(address, wire::best_path(same_host)); });
  const auto proven = std::ranges::find_if(better, [&](const std::string& address) {
    return connections_.any_of(peer, [&](const Connection& connection) {
      return !same_host && host_of(connection.dialled) == host_of(address);
    });
  });
  if (proven != better.end()) better = {*proven};
  Duration delay{};
  for (const std::string& address : better) {
    add_target(now, address, peer.name, peer.instance, delay, true);
    delay += shared_.config.dial_stagger;
  }
}

void Dialler::redial_peer(Time now, Peer& peer) {
  for (auto& [address, target] : targets_) {
    if (target.instance != peer.instance || target.state != DialTarget::State::idle) continue;
    target.next_try = std::min(target.next_try, now + shared_.config.redial_first);
    arm(target);
  }
  Duration delay{};
  const bool same_host = peer.host_key == shared_.config.host_key;
  for (const std::string& address : dialable(peer.addresses, same_host)) {
    add_target(now, address, peer.name, peer.instance, delay, false);
    delay += shared_.config.dial_stagger;
  }
}

// A firewall that has forgotten a connection drops its traffic silently. With a new connection the
// session need not be lost.
void Dialler::watch_silence(Time now, Peer& peer) {
  const bool silent = peer.up && peer.session.connected() && !Peers::answers(now, &peer);
  if (std::exchange(peer.silent, silent) || !silent) return;
  for (const auto& [id, connection] : connections_.all()) {
    if (connection.peer != &peer) continue;
    if (DialTarget* target = of_connection(id)) leave(*target, now);
  }
  redial_peer(now, peer);
}

void Dialler::leave(DialTarget& target, Time now) {
  target.state = DialTarget::State::idle;
  target.connection = 0;
  target.next_try = now;
}

void Dialler::arm(const DialTarget& target) {
  if (target.state == DialTarget::State::idle) {
    shared_.timers.push({target.next_try, Timer::Kind::dial, target.number, {}});
  }
}

DialTarget* Dialler::due(Time now, std::uint64_t number) {
  const auto found = std::ranges::find_if(
      targets_, [&](const auto& entry) { return entry.second.number == number; });
  if (found == targets_.end()) return nullptr;
  DialTarget& target = found->second;
  return target.state == DialTarget::State::idle && target.next_try <= now ? &target : nullptr;
}

void Dialler::dial(Time now, DialTarget& target, bool searched) {
  if (needed(now, target, searched)) {
    shared_.post(Dial{target.address});
    target.state = DialTarget::State::dialling;
    target.refused = false;
  } else if (target.wanted_by_user && !shared_.closing) {
    target.next_try = now + shared_.config.redial_last;  // connected in another way: check later
    arm(target);
  } else {
    give_up_better_path(target);
    targets_.erase(target.address);
  }
}

bool Dialler::needed(Time now, const DialTarget& target, bool searched) const {
  if (shared_.closing) return false;
  const Peer* peer = target.wanted_by_user ? peers_.find(target.instance) : peer_of(target);
  if (target.wanted_by_user && !Peers::answers(now, peer)) return true;
  if (target.better_path) {
    if (peer == nullptr || !peer->session.connected()) return false;
    const wire::PathKind best = wire::best_path(peer->host_key == shared_.config.host_key);
    const bool has_it = connections_.any_of(
        *peer, [&](const Connection& connection) { return connection.kind == best; });
    return !has_it && (comes_back(target) || target.failures < kBetterPathTries);
  }
  if (target.wanted_by_user) return false;
  return searched || (peer != nullptr && peer->up && !Peers::answers(now, peer));
}

DialTarget* Dialler::find(const std::string& address) {
  const auto found = targets_.find(address);
  return found == targets_.end() ? nullptr : &found->second;
}

DialTarget* Dialler::of_connection(wire::ConnectionId connection) {
  for (auto& [address, target] : targets_) {
    if (target.state == DialTarget::State::open && target.connection == connection) return &target;
  }
  return nullptr;
}

bool Dialler::refused_everywhere(const std::string& address) {
  const DialTarget* target = find(address);
  return target != nullptr && target->wanted_by_user &&
         std::ranges::all_of(targets_, [](const auto& entry) {
           return entry.second.refused || !entry.second.wanted_by_user;
         });
}

// ---- what became of a dial ----

void Dialler::opened(DialTarget& target, wire::ConnectionId connection) {
  target.state = DialTarget::State::open;
  target.connection = connection;
  target.next_try = kNever;
}

void Dialler::attached(const Connection& connection, Peer& peer) {
  DialTarget* target = of_connection(connection.id);
  if (target == nullptr) return;
  target->instance = peer.instance;
  target->pause = shared_.config.redial_first;
  target->failures = 0;
  target->last_error.clear();
  target->refused_at = target->refused_since = kNever;
  peer.tried.erase(target->address);
  if (connection.kind != wire::kBestBetweenHosts) return;
  // If the path is lost, it is dialled while another one is used.
  target->better_path = true;
  if (!std::exchange(peer.fallback_told, false)) return;
  shared_.log(LogLevel::info, std::string(wire::kTechnologies[wire::kBestBetweenHosts]) +
                                  " to peer '" + peer.name + "' works again");
}

Duration Dialler::refused(DialTarget& target, Time now) {
  target.refused = target.error_is_refusal = true;
  if (target.refused_at == kNever || now - target.refused_at > kBetweenRefusals) {
    target.refused_since = now;
  }
  target.refused_at = now;
  return now - target.refused_since;
}

void Dialler::failed(Time now, DialTarget& target, const Error& error, bool attached,
                     Tried* searched) {
  target.state = DialTarget::State::idle;
  target.connection = 0;
  ++target.failures;
  target.next_try = now + target.pause;
  target.pause = std::min(2 * target.pause, shared_.config.redial_last);
  const auto report = [&] {
    if (attached) return;
    note_failure(target, error.message, searched);
    target.last_error = error.message;
    // After the refusal of a name, refused() sets it.
    target.error_is_refusal = error.code == ErrorCode::auth;
    log_lost_path(target);
  };
  guard(report, [](const Error&) {});
  guard([&] { arm(target); }, [&](const Error&) { arm(target); });
}

// Kept for explain(): with the peer of the address, or with the search for its name.
void Dialler::note_failure(const DialTarget& target, const std::string& error, Tried* searched) {
  Peer* peer = peer_at(target);
  Tried* tried = peer != nullptr ? &peer->tried : searched;
  if (tried == nullptr) return;
  if (tried->size() >= kTriedAddresses && !tried->contains(target.address)) return;
  Failures& noted = (*tried)[target.address];
  ++noted.tries;
  noted.error = error;
}

// Never a silent slow path: logs the fallback once.
void Dialler::give_up_better_path(const DialTarget& target) {
  Peer* peer = peer_of(target);
  if (!target.better_path || comes_back(target) || target.failures < kBetterPathTries ||
      peer == nullptr) {
    return;
  }
  const auto tried = peer->tried.find(target.address);
  if (tried != peer->tried.end()) tried->second.given_up = true;
  if (std::exchange(peer->fallback_told, true)) return;
  const bool same_host = peer->host_key == shared_.config.host_key;
  const std::string better = wire::kTechnologies[wire::kBestBetweenHosts];
  shared_.log(LogLevel::warning, "peer '" + peer->name +
                                     (same_host ? "' is on this host" : "' has " + better) +
                                     ", but " + target.address + " cannot be used after " +
                                     std::to_string(target.failures) +
                                     " tries: " + target.last_error + "; another path is used");
}

// A path that has worked was lost, and dialling it fails: logged once each time.
void Dialler::log_lost_path(const DialTarget& target) {
  Peer* peer = peers_.find(target.instance);
  if (!target.better_path || !comes_back(target) || peer == nullptr || !peer->up ||
      !peer->session.connected() || std::exchange(peer->fallback_told, true)) {
    return;
  }
  shared_.log(LogLevel::warning,
              std::string(wire::kTechnologies[wire::kBestBetweenHosts]) + " to peer '" +
                  peer->name +
                  "' is lost: another path is used until it is back: " + target.last_error);
}

}  // namespace moolink::rpc
