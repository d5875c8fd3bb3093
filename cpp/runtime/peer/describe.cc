#include "runtime/peer/describe.h"

#include <algorithm>
#include <vector>

#include "base/format.h"

namespace moolink::runtime {
namespace {

std::string measured(Duration round_trip) {
  return round_trip < Duration(0) ? "" : ", round trip " + in_milliseconds(round_trip);
}

}  // namespace

void describe_rest(std::string& text, const std::string& indent, std::size_t all,
                   std::size_t most) {
  if (all > most) text += indent + "... and " + std::to_string(all - most) + " more\n";
}

void describe_peers(const rpc::Node& node, Time now, std::string& text) {
  const std::vector<rpc::PeerInfo> peers = node.peers(now);
  for (std::size_t i = 0; i < std::min(peers.size(), kMostLines); ++i) {
    const rpc::PeerInfo& peer = peers[i];
    const rpc::Explanation known = node.explain(now, peer.name);
    text += "  peer '" + peer.name + "': " + known.reason + measured(peer.round_trip) + ", " +
            std::to_string(peer.unacknowledged_bytes) + " bytes unacknowledged\n";
    for (const rpc::PathState& path : known.paths) {
      if (path.in_use) continue;
      text += "    " + std::string(wire::kPathNames[path.kind]) + ": " + path.reason + "\n";
    }
  }
  describe_rest(text, "  ", peers.size(), kMostLines);
  for (const std::string& name : node.searched_names()) {
    const rpc::Explanation absent = node.explain(now, name);
    text += "  peer '" + name + "' is searched: " + absent.reason + "; asked:";
    for (const std::string& asked : absent.asked) text += " '" + asked + "'";
    text += absent.asked.empty() ? " no peer\n" : "\n";
  }
}

void describe_calls(const rpc::Node& node, Time now, std::size_t most, const std::string& indent,
                    std::string& text) {
  const std::vector<rpc::PendingCall> calls = node.pending_calls(now);
  for (std::size_t i = 0; i < std::min(calls.size(), most); ++i) {
    const rpc::PendingCall& call = calls[i];
    text += indent + "call " + std::to_string(call.id) + " of '" + call.function + "' at '" +
            call.peer + "' waits for " + in_seconds(call.age) + ": " + call.state;
    if (call.deadline != kNever) text += ", " + in_seconds(call.deadline - now) + " left";
    text += '\n';
  }
  describe_rest(text, indent, calls.size(), most);
}

}  // namespace moolink::runtime
