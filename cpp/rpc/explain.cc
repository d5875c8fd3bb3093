// How peers are reached, and why not on a better path. Decides nothing.

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "rpc/node.h"

namespace moolink::rpc {

namespace {

bool contains(const std::vector<wire::PathKind>& kinds, wire::PathKind kind) {
  return std::ranges::find(kinds, kind) != kinds.end();
}

std::string times(int count) { return count == 1 ? "once" : std::to_string(count) + " times"; }

}  // namespace

Explanation Node::explain(Time now, const std::string& name) const {
  Explanation explanation;
  explanation.name = joined_names_text(name);
  const PeerName of = PeerName::of(name);
  const std::set<std::string> groups = groups_of(of.name);
  const Peer* peer = receiver_of(of);
  // The name can mean this holder of the token, though no call has decided that yet.
  if (peer == nullptr && !of.group.empty() && groups.contains({})) peer = find_peer(of.name, {});
  if (peer == nullptr && of.group.empty() && groups.size() == 1) {
    peer = find_peer(name, *groups.begin());
  }
  if (means_this(of)) {
    explanation.instance = config_.instance;
    explanation.known = explanation.connected = explanation.same_host = true;
    explanation.reason = "it is this very peer: its calls do not leave the process";
    explanation.addresses = addresses_;
  } else if (peer != nullptr) {
    explain_peer(now, *peer, explanation);
  } else {
    explain_absence(now, of, explanation);
    if (of.group.empty() && groups.size() > 1) explanation.reason = several_of(of.name, groups);
  }
  return explanation;
}

void Node::explain_peer(Time now, const Peer& peer, Explanation& explanation) const {
  explanation.known = true;
  explanation.instance = peer.instance;
  explanation.connected = peer.session.connected();
  explanation.suspected = explanation.connected && peer.session.suspected(now);
  explanation.same_host = peer.host_key == config_.host_key;
  explanation.addresses = peer.addresses;
  explanation.tried = peer.tried;
  const std::vector<session::LinkInfo> links = peer.session.links(now);
  for (const wire::PathKind kind : wire::kBestFirst) {
    const bool offered = std::ranges::any_of(
        peer.addresses, [&](const std::string& address) { return is_of(address, kind); });
    const bool is_needed = !explanation.same_host || wire::serves(kind, true);
    if (!is_needed && !offered && !contains(config_.paths, kind)) continue;
    explanation.paths.push_back(explain_path(kind, peer, links));
  }
  const std::string silence = in_seconds(now - peer.session.last_heard());
  const std::string limit = in_seconds(config_.timing.evict_after);
  if (!explanation.connected) {
    explanation.reason =
        "the connection is lost, its addresses are dialled; nothing was heard for " + silence +
        ", it is given up after " + limit;
  } else if (explanation.suspected) {
    explanation.reason = "silent for " + silence +
                         " (suspected): its addresses are dialled anew, " +
                         "it is given up after " + limit;
  } else {
    const auto used =
        std::ranges::find_if(explanation.paths, [](const PathState& path) { return path.in_use; });
    explanation.reason = "connected over " + std::string(wire::kPathNames[links.front().kind]);
    if (used != explanation.paths.end() && !used->cipher.empty()) {
      explanation.reason += " in TLS 1.3 (" + used->cipher + ")";
    } else if (wire::serves(links.front().kind, false)) {
      explanation.reason += ", not encrypted";
    }
  }
}

PathState Node::explain_path(wire::PathKind kind, const Peer& peer,
                             const std::vector<session::LinkInfo>& links) const {
  PathState path;
  path.kind = kind;
  const auto live =
      std::ranges::find_if(links, [&](const session::LinkInfo& link) { return link.kind == kind; });
  if (live == links.end()) {
    path.reason = why_not_live(path, peer);
    return path;
  }
  static_cast<session::LinkInfo&>(path) = *live;
  path.live = true;
  if (const auto found = connections_.find(live->connection); found != connections_.end()) {
    path.address = found->second.dialled;
    path.cipher = found->second.traits.cipher;
  }
  if (path.in_use) return path;
  path.reason = live->silent >= config_.timing.suspect_after
                    ? "silent for " + in_seconds(live->silent) + " (suspected)"
                    : "ready: a better path is in use";
  return path;
}

std::string Node::why_not_live(const PathState& path, const Peer& peer) const {
  if (!contains(config_.paths, path.kind)) {
    const auto lacking = config_.lacking.find(path.kind);
    return lacking != config_.lacking.end() ? lacking->second : "not enabled here";
  }
  const bool same_host = peer.host_key == config_.host_key;
  if (!same_host && !wire::serves(path.kind, false)) return "on another host (host key differs)";
  std::vector<std::string> offered;
  for (const std::string& address : peer.addresses) {
    if (is_of(address, path.kind)) offered.push_back(address);
  }
  if (offered.empty()) return "the peer does not offer it";
  if (std::ranges::none_of(
          offered, [&](const std::string& address) { return reachable(address, same_host); })) {
    return "none of its addresses can be reached from another host";
  }
  for (const std::string& address : offered) {
    const auto tried = peer.tried.find(address);
    if (tried == peer.tried.end()) continue;
    const Failures& noted = tried->second;
    if (noted.given_up) return "tried " + times(noted.tries) + ", given up: " + noted.error;
    return "dial failed: " + noted.error + " (tried " + times(noted.tries) + ")";
  }
  for (const std::string& address : offered) {
    const auto target = dialler_.targets().find(address);
    if (target != dialler_.targets().end()) return "being dialled at " + address;
  }
  const bool better = path.kind == wire::best_path(same_host);
  return better && peer.session.connected() ? "left to the peer, which has dialled this one"
                                            : "not needed: another path is in use";
}

// For a peer that is not connected: the peers asked, and the results of its addresses.
void Node::explain_absence(Time now, const PeerName& of, Explanation& explanation) const {
  const auto search = searches_.find(of);
  const auto past = past_.find(of.name);
  Tried& tried = explanation.tried;
  std::set<std::string, std::less<>> asked;
  if (past != past_.end()) {
    tried = past->second.tried;
    asked = past->second.asked;
  }
  if (search != searches_.end()) {
    explanation.known = search->second.found;
    for (const auto& [address, noted] : search->second.tried) tried[address] = noted;
    asked.insert(search->second.asked.begin(), search->second.asked.end());
    explanation.reason = why_unreached(of);
  } else if (past != past_.end()) {
    const std::string ago = in_seconds(now - past->second.at) + " ago";
    explanation.reason = past->second.ended.empty()
                             ? "not found; no call waits for it any more since " + ago
                             : "lost: " + past->second.ended + " (last known " + ago + ")";
  } else {
    explanation.reason = "not connected, and no call has asked for this name yet";
  }
  // An address of connect() may be this peer.
  for (const auto& [address, target] : dialler_.targets()) {
    if (!target.wanted_by_user || target.last_error.empty()) continue;
    tried[address] = {target.failures, false, target.last_error, target.error_is_refusal};
  }
  explanation.asked.assign(asked.begin(), asked.end());
}

std::vector<PendingCall> Node::pending_calls(Time now) const {
  std::vector<PendingCall> pending;
  pending.reserve(calls_.size());
  for (const auto& [id, call] : calls_) {
    std::string state;
    switch (call.state) {
      case Call::State::searching:
        state = "the peer is not found (" + why_unreached(call.receiver) + "): is its name right?";
        break;
      case Call::State::waiting:
        state = "the peer takes no more calls now";
        break;
      case Call::State::sent:
        state = "sent";
        break;
      case Call::State::local:
        state = "runs here";
        break;
    }
    pending.push_back({id, call.receiver.text(), call.function, std::move(state),
                       now - call.started, call.deadline});
  }
  return pending;
}

std::vector<std::string> Node::searched_names() const {
  std::vector<std::string> names;
  for (const auto& [of, search] : searches_) names.push_back(of.name);
  return names;
}

}  // namespace moolink::rpc
