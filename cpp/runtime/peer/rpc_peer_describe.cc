// The state of a peer as text: for moolink dump and for errors of time-outs.

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {
namespace {

constexpr std::size_t kMostLines = 50;  // of each list: the text is for people
constexpr std::size_t kMostWaits = 10;  // ... in the detail of an error

void say_rest(std::string& text, const std::string& indent, std::size_t all, std::size_t most) {
  if (all > most) text += indent + "... and " + std::to_string(all - most) + " more\n";
}

std::string measured(Duration round_trip) {
  return round_trip < Duration(0) ? "" : ", round trip " + in_milliseconds(round_trip);
}

}  // namespace

std::string RpcPeer::why_none_connects(Time now) const {
  return now < not_accepted_until_ ? not_accepted_ : std::string();
}

void RpcPeer::describe(Time now, Describe how, std::string& text) const {
  const std::string who = "peer '" + node_.name() + "'";
  if (how == Describe::waits) {
    describe_calls(now, kMostWaits, who + ": ", text);
    describe_handlers(now, kMostWaits, who + ": ", text);
    return;
  }
  text += who + " (" + node_.instance().hex() + ")" + (closing_ ? ", closing" : "") + "\n";
  text += "  reached at:";
  for (const std::string& address : node_.addresses()) text += " " + address;
  text += node_.addresses().empty() ? " nowhere (it neither listens nor is connected)\n" : "\n";
  if (const std::string why = why_none_connects(now); !why.empty()) text += "  " + why + "\n";
  describe_peers(now, text);
  describe_calls(now, kMostLines, "  ", text);
  describe_handlers(now, kMostLines, "  ", text);
}

void RpcPeer::describe_peers(Time now, std::string& text) const {
  const std::vector<rpc::PeerInfo> peers = node_.peers(now);
  for (std::size_t i = 0; i < std::min(peers.size(), kMostLines); ++i) {
    const rpc::PeerInfo& peer = peers[i];
    const rpc::Explanation known = node_.explain(now, peer.name);
    text += "  peer '" + peer.name + "': " + known.reason + measured(peer.round_trip) + ", " +
            std::to_string(peer.unacknowledged_bytes) + " bytes unacknowledged\n";
    for (const rpc::PathState& path : known.paths) {
      if (path.in_use) continue;
      text += "    " + std::string(wire::kPathNames[path.kind]) + ": " + path.reason + "\n";
    }
  }
  say_rest(text, "  ", peers.size(), kMostLines);
  for (const std::string& name : node_.searched_names()) {
    const rpc::Explanation absent = node_.explain(now, name);
    text += "  peer '" + name + "' is searched: " + absent.reason + "; asked:";
    for (const std::string& asked : absent.asked) text += " '" + asked + "'";
    text += absent.asked.empty() ? " no peer\n" : "\n";
  }
}

void RpcPeer::describe_calls(Time now, std::size_t most, const std::string& indent,
                             std::string& text) const {
  const std::vector<rpc::PendingCall> calls = node_.pending_calls(now);
  for (std::size_t i = 0; i < std::min(calls.size(), most); ++i) {
    const rpc::PendingCall& call = calls[i];
    text += indent + "call " + std::to_string(call.id) + " of '" + call.function + "' at '" +
            call.peer + "' waits for " + in_seconds(call.age) + ": " + call.state;
    if (call.deadline != kNever) text += ", " + in_seconds(call.deadline - now) + " left";
    text += '\n';
  }
  say_rest(text, indent, calls.size(), most);
}

void RpcPeer::describe_handlers(Time now, std::size_t most, const std::string& indent,
                                std::string& text) const {
  std::vector<std::pair<Time, std::string>> lines;
  for (const auto& [key, handling] : running_) {
    const auto responder = handling.responder.lock();
    if (!responder) continue;
    std::string line = "handler of '" + responder->function() + "' for '" + handling.caller +
                       "' (its call " + std::to_string(key.id) + ") since " +
                       in_seconds(now - handling.arrived);
    const Responder::Run run = responder->run();
    if (handling.returned && responder->streamed()) {
      line += ": streams as its caller takes items";
    } else if (handling.returned) {
      line += ": returned, its reply is deferred";
    } else if (!handling.held.empty()) {
      line += ": waits until its caller takes the results that wait for it";
    } else if (run.thread == 0) {
      line += ": waits for a worker or the interpreter";
    } else {
      line += ": runs since " + in_seconds(now - run.began) + " on thread " +
              std::to_string(run.thread);
    }
    if (handling.unwanted) line += ", its caller does not wait any more";
    lines.emplace_back(handling.arrived, std::move(line));
  }
  std::ranges::sort(lines);
  for (std::size_t i = 0; i < std::min(lines.size(), most); ++i) {
    text += indent + lines[i].second + "\n";
  }
  say_rest(text, indent, lines.size(), most);
}

std::vector<std::string> RpcPeer::flight_recorder() {
  const Engine::Lock lock = context_->lock();
  std::vector<std::string> lines;
  const Time now = io::now();
  for (const FlightEvent& event :
       context_->recorder().last(FlightRecorder::kEvents, node_.name())) {
    lines.push_back(line_of(event, now));
  }
  return lines;
}

rpc::Explanation RpcPeer::explain(const std::string& peer) {
  const Engine::Lock lock = context_->lock();
  return node_.explain(io::now(), peer);
}

}  // namespace moolink::runtime
