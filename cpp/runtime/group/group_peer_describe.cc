// A group's texts about itself: for its user, for the log, and in a dump.

#include "base/format.h"
#include "io/loop.h"
#include "runtime/group/group_peer.h"

namespace moolink::runtime {

std::string GroupPeer::waiting_for() {
  const Engine::Lock lock = lock_open();
  return member_.waiting_for().empty() ? std::string() : explain(io::now());
}

// One sentence: what the group waits for, and what to do; or what is unavailable meanwhile.
std::string GroupPeer::explain(Time now) const {
  std::string waiting = member_.waiting_for();
  if (broker_) return waiting;
  if (!waiting.empty()) return waiting + how_to_reach_the_broker(now);
  return "group '" + name_ + "' goes on with membership " + std::to_string(member_.view()->epoch) +
         " without its broker: no peer can join, and the death of a member would stop it" +
         how_to_reach_the_broker(now);
}

std::string GroupPeer::how_to_reach_the_broker(Time now) const {
  const rpc::Explanation known = rpc_->node().explain(now, broker_name_);
  std::string tried;
  bool all_refuse = true;
  for (const auto& [address, failures] : known.tried) {
    tried += "; " + rpc::with_address(address, failures.error);
    all_refuse = all_refuse && failures.refused;
  }
  const std::string broker = "'" + broker_name_ + "'";
  if (!tried.empty()) return all_refuse ? tried : tried + ": does broker " + broker + " run there?";
  if (rpc_->node().peers(now).empty()) {
    return ": call connect() with the address that broker " + broker + " listens on";
  }
  return ": no peer that is connected knows a broker " + broker +
         "; call connect() with its address, or set_broker_name() if it has another name";
}

void GroupPeer::remind(Time now) {
  const bool waits = !broker_ || !member_.waiting_for().empty();
  if (!waits) waits_since_ = kNever;
  if (waits && waits_since_ == kNever) waits_since_ = now;
  if (waits && reminder_.due(waits_since_, now)) {
    rpc_->context()->log(LogLevel::warning,
                         explain(now) + " (for " + in_seconds(now - waits_since_) + ")");
  }
}

void GroupPeer::describe(Time now, Describe how, std::string& text) const {
  const std::string who = "group '" + name_ + "' of peer '" + rpc_->node().name() + "'";
  if (how == Describe::everything) {
    const group::View& view = *member_.active_view();
    text += who + ": " + (view.empty() ? "no member yet" : group::describe(view));
    if (member_.view()->epoch != view.epoch) {
      text += "; next: " + group::describe(*member_.view());
    }
    text += "; broker '" + broker_name_ + (broker_ ? "' connected\n" : "' not connected\n");
  }
  if (const std::string waiting = member_.waiting_for(); !waiting.empty()) {
    text += who + " waits: " + waiting + "\n";
  }
  for (const auto& [op, running] : running_) {
    text += who + ", operation '" + running.operation + "' waits for:";
    const std::vector<std::string> names = runner_->waiting_for(op);
    for (const std::string& name : names) text += " '" + name + "'";
    text += (names.empty() ? " no member, " : ", ") + in_seconds(running.deadline - now) + " left";
    if (!names.empty()) text += own_lack(now);
    text += '\n';
  }
}

// Why the others may wait for this member: it cannot accept their connections.
std::string GroupPeer::own_lack(Time now) const {
  const std::string why = rpc_->why_none_connects(now);
  return why.empty() ? why : "; " + why;
}

}  // namespace moolink::runtime
