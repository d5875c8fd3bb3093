// The peer that a call by name goes to, if groups with keys of their own have peers of equal names.
// A holder of a group's key may take any name. So a holder of the token calls a peer that holds a
// group's key by its name alone only once no connected holder of the token knows a namesake in
// another group; otherwise the call fails. A name with a group means a holder of the token only
// once no connected holder of the token knows a peer of the name in that group. Peers with a
// group's key meet no namesakes.

#include <algorithm>
#include <utility>

#include "base/mutant.h"
#include "rpc/node.h"

namespace moolink::rpc {

namespace {

// The most names that a peer has asked about and is told later namesakes of.
constexpr std::size_t kNamesAsked = 65536;

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

// Of the peers of that name that are up.
std::set<std::string> Node::groups_of(const std::string& name) const {
  std::set<std::string> groups;
  for (auto at = names_.lower_bound({name, {}}); at != names_.end() && at->first.first == name;
       ++at) {
    const Peer* peer = find_peer(at->second);
    if (peer != nullptr && peer->up) groups.insert(at->first.second);
  }
  return groups;
}

Peer* Node::receiver_of(const PeerName& of) const {
  const auto if_up = [](Peer* peer) { return peer != nullptr && peer->up ? peer : nullptr; };
  Peer* first = if_up(find_peer(of.name, of.group));
  if (first != nullptr) return first;
  const bool first_found = !authenticator_->scope().empty() || mutant("first_namesake");
  if (!first_found && (of.group.empty() || !mutant("token_before_group"))) {
    const auto meaning = meanings_.find(of);
    return meaning == meanings_.end() ? nullptr : if_up(find_peer(meaning->second));
  }
  if (!of.group.empty()) return if_up(find_peer(of.name, {}));
  const std::set<std::string> groups = groups_of(of.name);
  return groups.empty() ? nullptr : find_peer(of.name, *groups.begin());
}

bool Node::means_this(const PeerName& of) const {
  if (of.name != config_.name) return false;
  if (of.group.empty() || of.group == authenticator_->scope()) return true;
  const auto meaning = meanings_.find(of);
  return meaning != meanings_.end() && meaning->second == config_.instance;
}

// Sends the calls that wait for the name once it is certain which peer it means.
void Node::resume_calls(Time now, Search& search) {
  if (receiver_of(search.of) == nullptr && !means_this(search.of)) decide(now, search);
  const bool runs_here = means_this(search.of);
  Peer* peer = runs_here ? nullptr : receiver_of(search.of);
  while ((runs_here || peer != nullptr) && !search.calls.empty()) {
    const CallId id = search.calls.front();
    search.calls.pop_front();
    const auto found = calls_.find(id);
    if (found == calls_.end()) continue;
    guard(
        [&] {
          runs_here ? run_locally(id, found->second) : dispatch(now, *peer, id, found->second);
        },
        [&](const Error& error) { complete(id, error); });
  }
  if (search.calls.empty() && search.services.empty()) searches_.erase(PeerName(search.of));
}

// Decides which peer the name means, if that is not certain yet, once all connected holders of the
// token have answered. If several peers have the name and it means none of them, the calls fail.
void Node::decide(Time now, Search& search) {
  const auto& [name, group] = search.of;
  std::set<std::string> groups = groups_of(name);
  if (name == config_.name) groups.insert(std::string());
  const bool has_candidate = group.empty() ? !groups.empty() : groups.contains({});
  if (!authenticator_->scope().empty() || !has_candidate || search.calls.empty()) return;
  if (!search.namesakes) ask_namesakes(now, search);
  std::set<Uid>& asked = search.namesakes->asked;
  // The answer of a silent one counts when it comes.
  std::erase_if(asked, [&](const Uid& peer) { return !answers(now, find_peer(peer)); });
  if (!asked.empty()) return;
  groups.merge(search.namesakes->groups);
  search.namesakes.reset();
  const bool is_own = name == config_.name;
  if (groups.contains(group)) {
    if (is_own) fail(search, own_name_of(name, group));  // else that peer is dialled
  } else if (!group.empty()) {
    meanings_[search.of] = is_own ? config_.instance : find_peer(name, {})->instance;
  } else if (groups.size() == 1) {
    meanings_[search.of] = find_peer(name, *groups.begin())->instance;
  } else {
    fail(search, several_of(name, groups));
  }
}

void Node::fail(Search& search, const std::string& why) {
  for (const CallId id : std::exchange(search.calls, {})) {
    complete(id, make_error(ErrorCode::error, why));
  }
}

void Node::ask_namesakes(Time now, Search& search) {
  Search::Namesakes& question = search.namesakes.emplace();
  if (authenticator_->is_insecure()) return;  // no peer holds a group's key
  for (const auto& [instance, peer] : peers_) {
    if (!peer->up || !peer->tells_namesakes) continue;
    question.asked.insert(instance);
    send_to(now, *peer, Service::namesakes, encode_namesakes({search.of.name, true, {}}));
  }
}

void Node::tell_namesakes(Time now, Peer& to, const std::string& name) {
  std::set<std::string> groups = groups_of(name);
  if (name == config_.name) groups.insert(std::string());
  send_to(now, to, Service::namesakes,
          encode_namesakes({name, false, {groups.begin(), groups.end()}}));
}

void Node::namesakes_message(Time now, Peer& from, const wire::Payload& payload) {
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
void Node::forget_meanings(const std::string& name, const std::string& group) {
  if (mutant("late_namesake")) return;
  for (const PeerName& of : {PeerName{name, {}}, PeerName{name, group}}) {
    const auto meaning = meanings_.find(of);
    if (meaning == meanings_.end()) continue;
    const Peer* peer = find_peer(meaning->second);
    if (peer == nullptr || peer->scope != group) meanings_.erase(meaning);
  }
}

// The peer is up: it may be a namesake, and know others.
void Node::met(Time now, Peer& peer) {
  forget_meanings(peer.name, peer.scope);
  if (peer.tells_namesakes && !mutant("late_namesake")) meanings_.clear();
  for (const auto& [instance, other] : peers_) {
    if (other->up && other->names_asked.contains(peer.name)) {
      tell_namesakes(now, *other, peer.name);
    }
  }
  if (!peer.tells_namesakes) return;
  for (auto& [of, search] : searches_) {
    if (!search.namesakes) continue;
    search.namesakes->asked.insert(
        peer.instance);  // again, if the question was lost with a session
    send_to(now, peer, Service::namesakes, encode_namesakes({of.name, true, {}}));
  }
}

}  // namespace moolink::rpc
