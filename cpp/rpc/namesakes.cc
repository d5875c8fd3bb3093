// The peer that a call by name goes to, if groups with keys of their own have peers of equal names.
// A holder of a group's key may take any name. So a holder of the token calls a peer that holds a
// group's key by its name alone only once no connected holder of the token knows a namesake in
// another group; otherwise the call fails. Peers with a group's key meet no namesakes.

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
  if (!of.group.empty()) {
    Peer* member = if_up(find_peer(of.name, of.group));
    return member != nullptr ? member : if_up(find_peer(of.name, {}));
  }
  const bool in_group = !authenticator_->scope().empty() || mutant("first_namesake");
  for (auto at = names_.lower_bound({of.name, {}});
       at != names_.end() && at->first.first == of.name; ++at) {
    Peer* peer = if_up(find_peer(at->second));
    if (in_group || at->first.second.empty()) return peer;
    if (peer != nullptr && peer->sole) return peer;
  }
  return nullptr;
}

// Sends the calls that wait for the name once it is certain which peer it means.
void Node::resume_calls(Time now, Search& search) {
  Peer* peer = receiver_of(search.of);
  if (peer == nullptr) peer = decide(now, search);
  while (peer != nullptr && !search.calls.empty()) {
    const CallId id = search.calls.front();
    search.calls.pop_front();
    const auto found = calls_.find(id);
    if (found == calls_.end()) continue;
    guard([&] { dispatch(now, *peer, id, found->second); },
          [&](const Error& error) { complete(id, error); });
  }
  if (search.calls.empty() && search.services.empty()) searches_.erase(PeerName(search.of));
}

// The only peer of the name, which holds a group's key. Null: it is not certain yet, none is up, or
// there are several, and the calls have failed.
Peer* Node::decide(Time now, Search& search) {
  const std::string& name = search.of.name;
  std::set<std::string> groups = groups_of(name);
  if (!search.of.group.empty() || groups.empty() || search.calls.empty()) return nullptr;
  if (!search.namesakes) ask_namesakes(now, search);
  std::set<Uid>& asked = search.namesakes->asked;
  std::erase_if(asked, [&](const Uid& peer) { return !answers(now, find_peer(peer)); });
  if (!asked.empty()) return nullptr;
  groups.merge(search.namesakes->groups);
  search.namesakes.reset();
  if (groups.contains({})) return nullptr;  // a holder of the token, which is dialled
  if (groups.size() == 1) {
    Peer* peer = find_peer(name, *groups.begin());
    peer->sole = true;
    return peer;
  }
  for (const CallId id : std::exchange(search.calls, {})) {
    complete(id, make_error(ErrorCode::error, several_of(name, groups)));
  }
  return nullptr;
}

void Node::ask_namesakes(Time now, Search& search) {
  Search::Namesakes& question = search.namesakes.emplace();
  for (const auto& [instance, peer] : peers_) {
    if (!peer->tells_namesakes || !answers(now, peer.get())) continue;
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
  for (const std::string& group : message.groups) forget_sole(message.name, group);
  const auto entry = searches_.find(PeerName{message.name, {}});
  if (entry == searches_.end() || !entry->second.namesakes) return;
  Search::Namesakes& question = *entry->second.namesakes;
  if (question.asked.erase(from.instance) == 0) return;
  question.groups.insert(message.groups.begin(), message.groups.end());
  resume_calls(now, entry->second);
}

// There is a peer of the name in `group`: others are not the only ones any more.
void Node::forget_sole(const std::string& name, const std::string& group) {
  if (mutant("late_namesake")) return;
  for (auto at = names_.lower_bound({name, {}}); at != names_.end() && at->first.first == name;
       ++at) {
    Peer* peer = find_peer(at->second);
    if (peer != nullptr && peer->scope != group) peer->sole = false;
  }
}

// The peer is up: it may be a namesake, and know others.
void Node::met(Time now, Peer& peer) {
  peer.sole = false;
  forget_sole(peer.name, peer.scope);
  for (const auto& [instance, other] : peers_) {
    if (peer.tells_namesakes && !mutant("late_namesake")) other->sole = false;
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
