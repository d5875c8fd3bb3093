#include "rpc/directory.h"

#include <algorithm>
#include <utility>

#include "wire/hostile_messages.h"

namespace moolink::rpc {

namespace {

constexpr std::size_t kPasts = 64;  // lost peers and ended searches
// The most names that a peer has asked about and is told later namesakes of.
constexpr std::size_t kNamesAsked = 65536;

wire::Payload encode_directory(DirectoryMessage message) {
  if (message.found) {
    wire::lie("found.instance", message.found->instance.low);
    auto addresses = message.found->addresses.size();
    wire::lie("found.addresses", addresses);
    message.found->addresses.resize(addresses, "tcp://192.0.2.1:1");
  }
  return {wire::encode(message), {}};
}

wire::Payload encode_namesakes(const NamesakesMessage& message) {
  return {wire::encode(message), {}};
}

std::string listed(const std::set<std::string>& groups) {
  std::string text;
  for (auto group = groups.begin(); group != groups.end(); ++group) {
    if (group != groups.begin()) text += std::next(group) == groups.end() ? " and " : ", ";
    text += "'" + *group + "'";
  }
  return text;
}

std::string own_name_of(const std::string& name, const std::string& group) {
  return "a peer with the key of group '" + group + "' is called '" + name +
         "', as this peer is: two peers of one name do not connect to each other, so give one "
         "of them another name";
}

}  // namespace

std::string several_of(const std::string& name, const std::set<std::string>& groups) {
  return "peers with the keys of groups " + listed(groups) + " are called '" + name +
         "': name the group, as in moolink.in_group('" + *groups.begin() + "', '" + name + "')";
}

// ---- the search of a name ----

Search& Directory::search_for(Time now, const PeerName& of) {
  if (const auto known = searches_.find(of); known != searches_.end()) return known->second;
  Search search;
  search.number = ++last_search_;
  search.of = of;
  search.pause = shared_.config.find_first;
  shared_.timers.push({now + search.pause, Timer::Kind::search, search.number, {}});
  return searches_.emplace(of, std::move(search)).first->second;
}

void Directory::add(Time now, const Call& call) {
  const bool is_new = !searches_.contains(call.receiver);
  Search& search = search_for(now, call.receiver);
  if (is_new) ask_all_peers(now, search);
  if (search.calls.size() >= shared_.config.max_waiting_calls) {
    calls_.fail(call.id, ErrorCode::queue_full,
                "too many calls wait for peer '" + call.receiver.text() + "', " +
                    why_unreached(call.receiver));
    return;
  }
  search.calls.push_back(call.id);
  if (search.calls.size() == 1) resume_calls(now, search);
}

void Directory::add(Time now, const std::string& name, session::OutgoingMessage message,
                    const Uid& instance, const std::string& scope) {
  session::check(message, shared_.config.limits);
  const bool is_new = !searches_.contains(PeerName{name, {}});
  Search& search = search_for(now, {name, {}});
  search.services.push_back(
      {now + shared_.config.timing.evict_after, std::move(message), instance, scope});
  if (is_new) ask_all_peers(now, search);
}

// Names that members of one group search are hidden from other groups: a peer confined to a group
// is only asked, and only believed, about that group.
bool Directory::may_ask(const Peer& peer, const Search& search) const {
  if (peer.scope.empty() || !shared_.authenticator.scope().empty()) return true;
  return std::ranges::any_of(search.services,
                             [&](const auto& waiting) { return waiting.scope == peer.scope; });
}

void Directory::ask_all_peers(Time now, Search& search) {
  for (const auto& [instance, peer] : peers_.all()) {
    if (!peer->up || !may_ask(*peer, search)) continue;
    ask(now, *peer, search.of.name);
    search.asked.insert(peer->name);
  }
}

void Directory::ask(Time now, Peer& peer, const std::string& name) {
  DirectoryMessage message;
  message.find = name;
  peers_.send_service(now, peer, Service::directory, encode_directory(std::move(message)));
}

void Directory::due(Time now, std::uint64_t number) {
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
  search.pause = std::min(2 * search.pause, shared_.config.find_last);
  shared_.timers.push({now + search.pause, Timer::Kind::search, search.number, {}});
  ask_all_peers(now, search);
  if (!search.calls.empty()) resume_calls(now, search);
}

void Directory::drop_overdue(Time now, Search& search) {
  std::erase_if(search.services, [&](const Search::Waiting& waiting) {
    if (waiting.until > now) return false;
    if (!waiting.instance.empty()) undelivered(waiting.instance);
    return true;
  });
}

void Directory::undelivered(const Uid& instance) { shared_.post(Undelivered{instance}); }

void Directory::fail_calls(const std::string& name, bool all, const Error& error) {
  std::vector<CallId> failing;
  for (const auto& [searched, search] : searches_) {
    if (searched.name != name && !all) continue;
    failing.insert(failing.end(), search.calls.begin(), search.calls.end());
  }
  for (const CallId id : failing) calls_.complete(id, error);
}

void Directory::remember(Time now, const std::string& name, Past past) {
  if (shared_.closing) return;
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

Tried* Directory::tried(const std::string& name) {
  const auto search = searches_.lower_bound(PeerName{name, {}});
  const bool found = search != searches_.end() && search->first.name == name;
  return found ? &search->second.tried : nullptr;
}

std::string Directory::why_unreached(const PeerName& of) const {
  const Search* search = find(of);
  const std::string name = of.text();
  std::string text;
  if (search != nullptr && search->namesakes) {
    const bool alone = of.group.empty();
    text = "peer '" + of.name + "' holds " + (alone ? "a group's key" : "the token") +
           ", and other peers have not said yet whether " +
           (alone ? "another group" : "group '" + of.group + "'") + " has a peer of that name";
  } else if (search != nullptr && search->reachable) {
    text = "peer '" + name + "' is known but does not answer";
  } else if (search != nullptr && search->found) {
    text = "peer '" + name + "' is known, but none of its addresses can be reached from here";
  } else {
    text = "peer '" + name + "' is not known to any connected peer";
    if (!peers_.any_is_up()) text += ": none is connected";
  }
  for (const auto& [address, target] : dialler_.targets()) {
    if (!target.last_error.empty()) text += "; " + with_address(address, target.last_error);
  }
  return text;
}

std::vector<std::string> Directory::searched_names() const {
  std::vector<std::string> names;
  for (const auto& [of, search] : searches_) names.push_back(of.name);
  return names;
}

// ---- peers come and go ----

// First the overdue messages: they waited while the peer was not up.
void Directory::expect(Time now, const Peer& peer) {
  past_.erase(peer.name);
  const auto own = searches_.find(PeerName{peer.name, {}});
  if (own != searches_.end()) drop_overdue(now, own->second);
}

// Messages that an exception leaves with a search wait for the peer's next session.
void Directory::met(Time now, Peer& peer, std::uint64_t features) {
  peer.tells_namesakes = peer.scope.empty() && (features & wire::kNamesakesFeature) != 0;
  exchange_namesakes(now, peer);
  const std::string name = peer.name;
  if (const auto plain = searches_.find(PeerName{name, {}}); plain != searches_.end()) {
    send_services(now, peer, plain->second);
  }
  for (auto next = searches_.lower_bound(PeerName{name, {}});
       next != searches_.end() && next->first.name == name;) {
    Search& search = next++->second;
    resume_calls(now, search);
  }
  for (const auto& [of, search] : searches_) {
    if (may_ask(peer, search)) ask(now, peer, of.name);
  }
}

void Directory::send_services(Time now, Peer& peer, Search& search) {
  for (std::size_t left = search.services.size(); left > 0; --left) {
    Search::Waiting waiting = std::move(search.services.front());
    search.services.pop_front();
    if (!peer.scope.empty() && !waiting.scope.empty() && waiting.scope != peer.scope) {
      search.services.push_back(std::move(waiting));  // for a peer of this name in another group
    } else if (!waiting.instance.empty() && waiting.instance != peer.instance) {
      undelivered(waiting.instance);
    } else {
      peers_.send(now, peer, std::move(waiting.message));
    }
  }
}

void Directory::lost(Time now, Peer& peer, const std::string& why) {
  remember(now, peer.name, {now, why, {}, peer.tried});
}

void Directory::forget(const Peer& peer) {
  std::erase_if(meanings_, [&](const auto& entry) { return entry.second == peer.instance; });
}

// ---- questions and answers ----

void Directory::directory_message(Time now, Peer& from, const wire::Payload& payload) {
  auto message = wire::decode<DirectoryMessage>(payload.body);
  if (message.found && message.found->addresses.size() > wire::kMaxAddresses) {
    wire::fail("too many addresses of a peer");
  }
  if (message.found) found(now, from, *message.found);
  if (!message.find) return;
  const std::string& name = *message.find;
  const Config& own = shared_.config;
  if (name == own.name) {
    return tell_of(now, from, Found{name, own.instance, own.host_key, shared_.addresses});
  }
  // A peer of one group learns of its own group and of peers of the whole job.
  std::set<std::string> groups = peers_.groups_of(name);
  if (!from.scope.empty()) {
    const bool has_own = groups.contains(from.scope);
    std::erase_if(groups, [&](const std::string& group) {
      return has_own ? group != from.scope : !group.empty();
    });
  }
  // If there is none, it asks again.
  for (const std::string& group : groups) {
    const Peer& peer = *peers_.find(name, group);
    tell_of(now, from, Found{name, peer.instance, peer.host_key, peer.addresses});
  }
}

void Directory::tell_of(Time now, Peer& to, Found found) {
  DirectoryMessage answer;
  answer.found = std::move(found);
  peers_.send_service(now, to, Service::directory, encode_directory(std::move(answer)));
}

void Directory::found(Time now, const Peer& from, const Found& found) {
  if (found.instance == shared_.config.instance) return;
  const std::vector<std::string> candidates =
      dialler_.dialable(found.addresses, found.host_key == shared_.config.host_key);
  bool wanted = false;
  for (auto at = searches_.lower_bound(PeerName{found.name, {}});
       at != searches_.end() && at->first.name == found.name; ++at) {
    Search& search = at->second;
    if (!may_ask(from, search)) continue;
    wanted = search.found = true;
    search.reachable = search.reachable || !candidates.empty();
  }
  const Peer* known = peers_.find(found.instance);
  if (!wanted || (known != nullptr && known->up)) return;
  dialler_.dial_found(now, found.name, candidates);
}

// ---- namesakes ----

Peer* Directory::receiver_of(const PeerName& of) const {
  const auto if_up = [](Peer* peer) { return peer != nullptr && peer->up ? peer : nullptr; };
  Peer* first = if_up(peers_.find(of.name, of.group));
  if (first != nullptr) return first;
  const bool first_found = !shared_.authenticator.scope().empty();
  if (!first_found) {
    const auto meaning = meanings_.find(of);
    return meaning == meanings_.end() ? nullptr : if_up(peers_.find(meaning->second));
  }
  if (!of.group.empty()) return if_up(peers_.find(of.name, {}));
  const std::set<std::string> groups = peers_.groups_of(of.name);
  return groups.empty() ? nullptr : peers_.find(of.name, *groups.begin());
}

bool Directory::means_this(const PeerName& of) const {
  if (of.name != shared_.config.name) return false;
  if (of.group.empty() || of.group == shared_.authenticator.scope()) return true;
  const auto meaning = meanings_.find(of);
  return meaning != meanings_.end() && meaning->second == shared_.config.instance;
}

// Sends the calls that wait for the name once it is certain which peer it means.
void Directory::resume_calls(Time now, Search& search) {
  if (receiver_of(search.of) == nullptr && !means_this(search.of)) decide(now, search);
  const bool runs_here = means_this(search.of);
  Peer* peer = runs_here ? nullptr : receiver_of(search.of);
  while ((runs_here || peer != nullptr) && !search.calls.empty()) {
    const CallId id = search.calls.front();
    search.calls.pop_front();
    Call* call = calls_.find(id);
    if (call == nullptr) continue;
    guard([&] { runs_here ? calls_.run_here(*call) : calls_.dispatch(now, *peer, *call); },
          [&](const Error& error) { calls_.complete(id, error); });
  }
  if (search.calls.empty() && search.services.empty()) searches_.erase(PeerName(search.of));
}

// Decides which peer the name means, if that is not certain yet, once all connected holders of the
// token have answered. If several peers have the name and it means none of them, the calls fail.
void Directory::decide(Time now, Search& search) {
  const auto& [name, group] = search.of;
  const bool is_own = name == shared_.config.name;
  std::set<std::string> groups = peers_.groups_of(name);
  if (is_own) groups.insert(std::string());
  const bool has_candidate = group.empty() ? !groups.empty() : groups.contains({});
  if (!shared_.authenticator.scope().empty() || !has_candidate || search.calls.empty()) return;
  if (!search.namesakes) ask_namesakes(now, search);
  std::set<Uid>& asked = search.namesakes->asked;
  // The answer of a silent one counts when it comes.
  std::erase_if(asked, [&](const Uid& peer) { return !Peers::answers(now, peers_.find(peer)); });
  if (!asked.empty()) return;
  groups.merge(search.namesakes->groups);
  search.namesakes.reset();
  const auto fail = [&](const std::string& why) {
    for (const CallId id : std::exchange(search.calls, {})) {
      calls_.complete(id, make_error(ErrorCode::error, why));
    }
  };
  if (groups.contains(group)) {
    if (is_own) fail(own_name_of(name, group));  // else that peer is dialled
  } else if (!group.empty()) {
    meanings_[search.of] = is_own ? shared_.config.instance : peers_.find(name, {})->instance;
  } else if (groups.size() == 1) {
    meanings_[search.of] = peers_.find(name, *groups.begin())->instance;
  } else {
    fail(several_of(name, groups));
  }
}

void Directory::ask_namesakes(Time now, Search& search) {
  Search::Namesakes& question = search.namesakes.emplace();
  if (shared_.authenticator.is_insecure()) return;  // no peer holds a group's key
  for (const auto& [instance, peer] : peers_.all()) {
    if (!peer->up || !peer->tells_namesakes) continue;
    question.asked.insert(instance);
    peers_.send_service(now, *peer, Service::namesakes,
                        encode_namesakes({search.of.name, true, {}}));
  }
}

void Directory::tell_namesakes(Time now, Peer& to, const std::string& name) {
  std::set<std::string> groups = peers_.groups_of(name);
  if (name == shared_.config.name) groups.insert(std::string());
  peers_.send_service(now, to, Service::namesakes,
                      encode_namesakes({name, false, {groups.begin(), groups.end()}}));
}

void Directory::namesakes_message(Time now, Peer& from, const wire::Payload& payload) {
  if (!from.tells_namesakes) return;  // it holds a group's key, or this peer does
  const auto message = wire::decode<NamesakesMessage>(payload.body);
  if (message.asks) {
    if (from.names_asked.size() < kNamesAsked) from.names_asked.insert(message.name);
    return tell_namesakes(now, from, message.name);
  }
  for (const std::string& group : message.groups) forget_meanings(message.name, group);
  for (auto next = searches_.lower_bound({message.name, {}});
       next != searches_.end() && next->first.name == message.name;) {
    Search& search = next++->second;
    if (!search.namesakes || search.namesakes->asked.erase(from.instance) == 0) continue;
    search.namesakes->groups.insert(message.groups.begin(), message.groups.end());
    resume_calls(now, search);
  }
}

// A peer with the key of `group` (empty: with the token) has the name. The meanings of the name
// alone, and with that group, may have changed.
void Directory::forget_meanings(const std::string& name, const std::string& group) {
  for (const PeerName& of : {PeerName{name, {}}, PeerName{name, group}}) {
    const auto meaning = meanings_.find(of);
    if (meaning == meanings_.end()) continue;
    const Peer* peer = peers_.find(meaning->second);
    if (peer == nullptr || peer->scope != group) meanings_.erase(meaning);
  }
}

// The peer is up: it may be a namesake, and know others.
void Directory::exchange_namesakes(Time now, Peer& peer) {
  forget_meanings(peer.name, peer.scope);
  if (peer.tells_namesakes) meanings_.clear();
  for (const auto& [instance, other] : peers_.all()) {
    if (other->up && other->names_asked.contains(peer.name)) {
      tell_namesakes(now, *other, peer.name);
    }
  }
  if (!peer.tells_namesakes) return;
  for (auto& [of, search] : searches_) {
    if (!search.namesakes) continue;
    search.namesakes->asked.insert(
        peer.instance);  // again, if the question was lost with a session
    peers_.send_service(now, peer, Service::namesakes, encode_namesakes({of.name, true, {}}));
  }
}

}  // namespace moolink::rpc
