// The places of peers: names searched through connected peers, and addresses to dial.

#include <algorithm>
#include <utility>

#include "base/mutant.h"
#include "rpc/node.h"
#include "wire/hostile_messages.h"

namespace moolink::rpc {

namespace {

constexpr int kBetterPathTries = 3;
constexpr std::size_t kTriedAddresses = 64;  // remembered for one peer
constexpr std::size_t kCandidates = 256;     // addresses tried for one name at a time
constexpr std::size_t kPasts = 64;           // lost peers and ended searches

// Whether a failed dial is repeated without limit: the best path between hosts, if it has worked,
// works again once its network is back.
bool comes_back(const DialTarget& target) {
  return is_of(target.address, wire::kBestBetweenHosts) && !target.instance.empty();
}

wire::Payload encode_directory(DirectoryMessage message) {
  if (message.found) {
    wire::lie("found.instance", message.found->instance.low);
    auto addresses = message.found->addresses.size();
    wire::lie("found.addresses", addresses);
    message.found->addresses.resize(addresses, "tcp://192.0.2.1:1");
  }
  return {wire::encode(message), {}};
}

}  // namespace

// ---- searches ----

Search& Node::search_for(Time now, const PeerName& of) {
  if (const auto known = searches_.find(of); known != searches_.end()) return known->second;
  Search search;
  search.number = ++last_search_;
  search.of = of;
  search.pause = config_.find_first;
  timers_.push({now + search.pause, Timer::Kind::search, search.number, {}});
  return searches_.emplace(of, std::move(search)).first->second;
}

// Throws Exception{invalid_argument} if the message is over the limits.
void Node::keep_for(Time now, const std::string& name, session::OutgoingMessage message,
                    const Uid& instance, const std::string& scope) {
  session::check(message, config_.limits);
  const bool is_new = !searches_.contains(PeerName{name, {}});
  Search& search = search_for(now, {name, {}});
  search.services.push_back(
      {now + config_.timing.evict_after, std::move(message), instance, scope});
  if (is_new) ask_all_peers(now, search);
}

// Names that members of one group search are hidden from other groups: a peer confined to a group
// is only asked, and only believed, about that group.
bool Node::may_ask(const Peer& peer, const Search& search) const {
  if (peer.scope.empty() || !authenticator_->scope().empty() || mutant("ask_other_groups"))
    return true;
  return std::ranges::any_of(search.services,
                             [&](const auto& waiting) { return waiting.scope == peer.scope; });
}

void Node::ask_all_peers(Time now, Search& search) {
  for (const auto& [instance, peer] : peers_) {
    if (!peer->up || !may_ask(*peer, search)) continue;
    ask(now, *peer, search.of.name);
    search.asked.insert(peer->name);
  }
}

void Node::ask(Time now, Peer& peer, const std::string& name) {
  DirectoryMessage message;
  message.find = name;
  send_to(now, peer, Service::directory, encode_directory(std::move(message)));
}

void Node::search_due(Time now, std::uint64_t number) {
  const auto entry = std::ranges::find_if(
      searches_, [&](const auto& candidate) { return candidate.second.number == number; });
  if (entry == searches_.end()) return;
  Search& search = entry->second;
  std::erase_if(search.calls, [this](CallId id) { return !calls_.contains(id); });
  drop_overdue(now, search);
  if (search.calls.empty() && search.services.empty()) {
    remember(now, search.of.name, {now, {}, std::move(search.asked), std::move(search.tried)});
    searches_.erase(entry);
    return;
  }
  if (mutant("search_asks_once")) return;
  search.pause = std::min(2 * search.pause, config_.find_last);
  timers_.push({now + search.pause, Timer::Kind::search, search.number, {}});
  ask_all_peers(now, search);
  if (!search.calls.empty()) resume_calls(now, search);
}

// The peer is up: sends the messages that waited for its name, in order. Messages that an exception
// leaves here wait for its next session.
void Node::end_search(Time now, Peer& peer) {
  const std::string name = peer.name;
  if (const auto plain = searches_.find(PeerName{name, {}}); plain != searches_.end()) {
    send_services(now, peer, plain->second);
  }
  for (auto next = searches_.lower_bound(PeerName{name, {}});
       next != searches_.end() && next->first.name == name;) {
    Search& search = next++->second;
    resume_calls(now, search);
  }
}

void Node::send_services(Time now, Peer& peer, Search& search) {
  for (std::size_t left = search.services.size(); left > 0; --left) {
    Search::Waiting waiting = std::move(search.services.front());
    search.services.pop_front();
    if (!peer.scope.empty() && !waiting.scope.empty() && waiting.scope != peer.scope) {
      search.services.push_back(std::move(waiting));  // for a peer of this name in another group
    } else if (!waiting.instance.empty() && waiting.instance != peer.instance) {
      undelivered(waiting.instance);
    } else {
      send_or_queue(now, peer, std::move(waiting.message));
    }
  }
}

void Node::drop_overdue(Time now, Search& search) {
  std::erase_if(search.services, [&](const Search::Waiting& waiting) {
    if (waiting.until > now) return false;
    if (!waiting.instance.empty()) undelivered(waiting.instance);
    return true;
  });
}

void Node::undelivered(const Uid& instance) {
  if (!mutant("undelivered_in_silence")) actions_.push_back(Undelivered{instance});
}

void Node::directory_message(Time now, Peer& from, const wire::Payload& payload) {
  auto message = wire::decode<DirectoryMessage>(payload.body);
  if (message.found && message.found->addresses.size() > wire::kMaxAddresses) {
    wire::fail("too many addresses of a peer");
  }
  if (message.found) found(now, from, *message.found);
  if (!message.find) return;
  const std::string& name = *message.find;
  if (name == config_.name) {
    return tell_of(now, from, Found{name, config_.instance, config_.host_key, addresses_});
  }
  // A peer of one group learns of its own group and of peers of the whole job.
  std::set<std::string> groups = groups_of(name);
  if (!from.scope.empty() && !mutant("tell_of_other_groups")) {
    const bool own = groups.contains(from.scope);
    std::erase_if(groups, [&](const std::string& group) {
      return own ? group != from.scope : !group.empty();
    });
  }
  // If there is none, it asks again.
  for (const std::string& group : groups) {
    const Peer& peer = *find_peer(name, group);
    tell_of(now, from, Found{name, peer.instance, peer.host_key, peer.addresses});
  }
}

void Node::tell_of(Time now, Peer& to, Found found) {
  DirectoryMessage answer;
  answer.found = std::move(found);
  send_to(now, to, Service::directory, encode_directory(std::move(answer)));
}

void Node::found(Time now, const Peer& from, const Found& found) {
  if (found.instance == config_.instance) return;
  const std::vector<std::string> candidates =
      dialable(found.addresses, found.host_key == config_.host_key);
  bool wanted = false;
  for (auto at = searches_.lower_bound(PeerName{found.name, {}});
       at != searches_.end() && at->first.name == found.name; ++at) {
    Search& search = at->second;
    if (!may_ask(from, search)) continue;
    wanted = search.found = true;
    search.reachable = search.reachable || !candidates.empty();
  }
  const Peer* known = find_peer(found.instance);
  if (!wanted || (known != nullptr && known->up)) return;
  Duration delay{};
  // Answering peers may invent any number of addresses.
  std::size_t tried = dialler_.count_for(found.name);
  for (const std::string& address : candidates) {
    if (dialler_.find(address) == nullptr && ++tried > kCandidates) return;
    add_target(now, address, found.name, {}, delay, false);
    delay += config_.dial_stagger;
  }
}

// ---- dialling ----

void Node::connect(Time now, const std::string& address) {
  if (closing_) return;
  DialTarget& target = dialler_.add(address, now);
  target.wanted_by_user = true;
  arm(target);
  settle(now);
}

void Node::add_target(Time now, const std::string& address, const std::string& name, const Uid& of,
                      Duration delay, bool better_path) {
  if (closing_ || std::ranges::find(addresses_, address) != addresses_.end()) {
    return;  // this peer's own
  }
  DialTarget& target = dialler_.add(address, now + delay);
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

// The addresses that can be tried from here, the best first.
std::vector<std::string> Node::dialable(std::vector<std::string> candidates, bool same_host) const {
  std::erase_if(candidates, [&](const std::string& address) {
    return !reachable(address, same_host) ||
           std::ranges::none_of(config_.paths,
                                [&](wire::PathKind kind) { return is_of(address, kind); });
  });
  sort_by_preference(candidates);
  return candidates;
}

// The session lives and has no connection: dials all its addresses, one after the other.
void Node::dial_peer(Time now, const Peer& peer) {
  Duration delay{};
  for (const std::string& address : dialable(peer.addresses, peer.host_key == config_.host_key)) {
    add_target(now, address, peer.name, peer.instance, delay, false);
    delay += config_.dial_stagger;
  }
}

// Connected, but not by the best path. Between hosts, dials the host address by which the peer was
// reached, if the peer announced it: dials of other addresses may fail, and only after a time-out.
void Node::dial_better_path(Time now, const Peer& peer) {
  const bool same_host = peer.host_key == config_.host_key;
  std::vector<std::string> better = dialable(peer.addresses, same_host);
  std::erase_if(better,
                [&](const auto& address) { return !is_of(address, wire::best_path(same_host)); });
  const auto proven = std::ranges::find_if(better, [&](const std::string& address) {
    return std::ranges::any_of(connections_, [&](const auto& entry) {
      return entry.second.peer == &peer && !same_host &&
             host_of(entry.second.dialled) == host_of(address);
    });
  });
  if (proven != better.end()) better = {*proven};
  Duration delay{};
  for (const std::string& address : better) {
    add_target(now, address, peer.name, peer.instance, delay, true);
    delay += config_.dial_stagger;
  }
}

void Node::arm(const DialTarget& target) {
  if (target.state == DialTarget::State::idle) {
    timers_.push({target.next_try, Timer::Kind::dial, target.number, {}});
  }
}

// Connected and heard: a silent peer may have been cut off without notice.
bool Node::answers(Time now, const Peer* peer) const {
  if (peer == nullptr || !peer->session.connected()) return false;
  return mutant("no_redial_when_silent") || !peer->session.suspected(now);
}

bool Node::needed(Time now, const DialTarget& target) const {
  if (closing_) return false;
  const Peer* peer = target.wanted_by_user ? find_peer(target.instance) : peer_of(target);
  if (target.wanted_by_user && !answers(now, peer)) return true;
  if (target.better_path) {
    if (peer == nullptr || !peer->session.connected()) return false;
    const wire::PathKind best = wire::best_path(peer->host_key == config_.host_key);
    const bool has_it = std::ranges::any_of(connections_, [&](const auto& entry) {
      return entry.second.peer == peer && entry.second.kind == best;
    });
    return !has_it && (comes_back(target) || target.failures < kBetterPathTries);
  }
  if (target.wanted_by_user) return false;
  if (find_search(target.peer) != nullptr) return true;
  return peer != nullptr && peer->up && !answers(now, peer);
}

// A firewall that has forgotten a connection drops its traffic silently. A peer that falls silent
// is dialled anew beside it, so that the session need not be lost.
void Node::watch_silence(Time now, Peer& peer) {
  const bool silent = peer.up && peer.session.connected() && !answers(now, &peer);
  if (std::exchange(peer.silent, silent) || !silent) return;
  for (const auto& [id, connection] : connections_) {
    if (connection.peer != &peer) continue;
    if (DialTarget* target = dialler_.of_connection(id)) dialler_.leave(*target, now);
  }
  disconnected_from(now, peer);
}

void Node::dial_due(Time now, std::uint64_t number) {
  DialTarget* target = dialler_.find(number);
  if (target == nullptr || target->state != DialTarget::State::idle || target->next_try > now) {
    return;
  }
  if (needed(now, *target)) {
    actions_.push_back(Dial{target->address});
    target->state = DialTarget::State::dialling;
    target->refused = false;
  } else if (target->wanted_by_user && !closing_) {  // connected in another way: check again later
    target->next_try = now + config_.redial_last;
    arm(*target);
  } else {
    give_up_better_path(*target);
    dialler_.remove(target->address);
  }
}

// Never a silent slow path: logs the fallback once.
void Node::give_up_better_path(DialTarget& target) {
  Peer* peer = peer_of(target);
  if (!target.better_path || comes_back(target) || target.failures < kBetterPathTries ||
      peer == nullptr) {
    return;
  }
  const auto tried = peer->tried.find(target.address);
  if (tried != peer->tried.end()) tried->second.given_up = true;
  if (std::exchange(peer->fallback_told, true)) return;
  const bool same_host = peer->host_key == config_.host_key;
  const std::string better = wire::kTechnologies[wire::kBestBetweenHosts];
  log(LogLevel::warning,
      "peer '" + peer->name + (same_host ? "' is on this host" : "' has " + better) + ", but " +
          target.address + " cannot be used after " + std::to_string(target.failures) +
          " tries: " + target.last_error + "; another path is used");
}

// A path that has worked was lost, and dialling it fails: logged once each time.
void Node::tell_of_lost_path(const DialTarget& target) {
  Peer* peer = find_peer(target.instance);
  if (!target.better_path || !comes_back(target) || peer == nullptr || !peer->up ||
      !peer->session.connected() || std::exchange(peer->fallback_told, true)) {
    return;
  }
  log(LogLevel::warning,
      std::string(wire::kTechnologies[wire::kBestBetweenHosts]) + " to peer '" + peer->name +
          "' is lost: another path is used until it is back: " + target.last_error);
}

// Kept for explain(): with the peer of the address, or with the search for its name.
void Node::note_failure(const DialTarget& target, const std::string& error) {
  Peer* peer = target.instance.empty() ? peer_of(target) : find_peer(target.instance);
  const auto search = searches_.lower_bound(PeerName{target.peer, {}});
  Tried* tried = nullptr;
  if (peer != nullptr) {
    tried = &peer->tried;
  } else if (search != searches_.end() && search->first.name == target.peer) {
    tried = &search->second.tried;
  }
  if (tried == nullptr) return;
  if (tried->size() >= kTriedAddresses && !tried->contains(target.address)) return;
  Failures& noted = (*tried)[target.address];
  ++noted.tries;
  noted.error = error;
}

void Node::remember(Time now, const std::string& name, Past past) {
  if (closing_) return;
  const auto known = past_.find(name);
  // A search that follows a loss must not hide the loss.
  if (known != past_.end() && past.ended.empty()) past.ended = std::move(known->second.ended);
  past.at = now;
  past_[name] = std::move(past);
  if (past_.size() <= kPasts) return;
  past_.erase(std::min_element(past_.begin(), past_.end(), [](const auto& a, const auto& b) {
    return a.second.at < b.second.at;
  }));
}

// It is dialled again even if memory is lacking.
void Node::dial_failed(Time now, const std::string& address, const Error& error) {
  guard([&] { dial_ended(now, address, error); },
        [&](const Error& lacking) { dial_ended(now, address, lacking); });
  settle(now);
}

void Node::dial_ended(Time now, const std::string& address, const Error& error) {
  DialTarget* target = dialler_.find(address);
  if (target == nullptr || target->state != DialTarget::State::dialling) return;
  const bool refused = error.code == ErrorCode::auth;
  if (refused) {
    Error told = error;
    told.message += "; " + authenticator_->advice();
    warn_once(now, told.message);
    fail_callers(now, address, {}, told);
  } else if (target->failures == 0 && target->wanted_by_user) {
    log(LogLevel::warning, error.message + "; trying again");
  }
  redial(now, *target, error, false);
  if (error.code != ErrorCode::peer_lost) return;
  // No peer listens there. The peer last met there, if not connected, has ended; so has a peer of
  // this host that announced the address.
  Peer* peer = target->instance.empty() ? peer_of(*target) : find_peer(target->instance);
  if (peer == nullptr || !peer->up || peer->session.connected()) return;
  if (peer->instance == target->instance || peer->host_key == config_.host_key) {
    end_peer(*peer, Down::dead, "no process listens at " + address + " any more");
  }
}

}  // namespace moolink::rpc
