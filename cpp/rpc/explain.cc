#include "rpc/explain.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/format.h"
#include "rpc/addresses.h"

namespace moolink::rpc {

namespace {

bool contains(const std::vector<wire::PathKind>& kinds, wire::PathKind kind) {
  return std::ranges::find(kinds, kind) != kinds.end();
}

std::string times(int count) { return count == 1 ? "once" : std::to_string(count) + " times"; }

}  // namespace

Explanation Explainer::explain(Time now, const std::string& name) const {
  Explanation explanation;
  explanation.name = joined_names_text(name);
  const PeerName of = PeerName::of(name);
  const std::set<std::string> groups = peers_.groups_of(of.name);
  const Peer* peer = directory_.receiver_of(of);
  // The name can mean this holder of the token, though no call has decided that yet.
  if (peer == nullptr && !of.group.empty() && groups.contains({})) peer = peers_.find(of.name, {});
  if (peer == nullptr && of.group.empty() && groups.size() == 1) {
    peer = peers_.find(name, *groups.begin());
  }
  if (directory_.means_this(of)) {
    explanation.instance = shared_.config.instance;
    explanation.known = explanation.connected = explanation.same_host = true;
    explanation.reason = "it is this very peer: its calls do not leave the process";
    explanation.addresses = shared_.addresses;
  } else if (peer != nullptr) {
    explain_peer(now, *peer, explanation);
  } else {
    explain_absence(now, of, explanation);
    if (of.group.empty() && groups.size() > 1) explanation.reason = several_of(of.name, groups);
  }
  return explanation;
}

void Explainer::explain_peer(Time now, const Peer& peer, Explanation& explanation) const {
  explanation.known = true;
  explanation.instance = peer.instance;
  explanation.connected = peer.session.connected();
  explanation.suspected = explanation.connected && peer.session.suspected(now);
  explanation.same_host = peer.host_key == shared_.config.host_key;
  explanation.addresses = peer.addresses;
  explanation.tried = peer.tried;
  const std::vector<session::LinkInfo> links = peer.session.links(now);
  for (const wire::PathKind kind : wire::kBestFirst) {
    const bool offered = std::ranges::any_of(
        peer.addresses, [&](const std::string& address) { return is_of(address, kind); });
    const bool is_needed = !explanation.same_host || wire::serves(kind, true);
    if (!is_needed && !offered && !contains(shared_.config.paths, kind)) continue;
    explanation.paths.push_back(explain_path(kind, peer, links));
  }
  const std::string silence = in_seconds(now - peer.session.last_heard());
  const std::string limit = in_seconds(shared_.config.timing.evict_after);
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

PathState Explainer::explain_path(wire::PathKind kind, const Peer& peer,
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
  if (const Connection* found = connections_.find(live->connection); found != nullptr) {
    path.address = found->dialled;
    path.cipher = found->traits.cipher;
  }
  if (path.in_use) return path;
  path.reason = live->silent >= shared_.config.timing.suspect_after
                    ? "silent for " + in_seconds(live->silent) + " (suspected)"
                    : "ready: a better path is in use";
  return path;
}

std::string Explainer::why_not_live(const PathState& path, const Peer& peer) const {
  if (!contains(shared_.config.paths, path.kind)) {
    const auto lacking = shared_.config.lacking.find(path.kind);
    return lacking != shared_.config.lacking.end() ? lacking->second : "not enabled here";
  }
  const bool same_host = peer.host_key == shared_.config.host_key;
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
void Explainer::explain_absence(Time now, const PeerName& of, Explanation& explanation) const {
  const Search* search = directory_.find(of);
  const Past* past = directory_.past(of.name);
  Tried& tried = explanation.tried;
  std::set<std::string, std::less<>> asked;
  if (past != nullptr) {
    tried = past->tried;
    asked = past->asked;
  }
  if (search != nullptr) {
    explanation.known = search->found;
    for (const auto& [address, noted] : search->tried) tried[address] = noted;
    asked.insert(search->asked.begin(), search->asked.end());
    explanation.reason = directory_.why_unreached(of);
  } else if (past != nullptr) {
    const std::string ago = in_seconds(now - past->at) + " ago";
    explanation.reason = past->ended.empty()
                             ? "not found; no call waits for it any more since " + ago
                             : "lost: " + past->ended + " (last known " + ago + ")";
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

}  // namespace moolink::rpc
