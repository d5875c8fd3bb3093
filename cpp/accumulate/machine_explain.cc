// For people: the members and events that a peer waits for. Decides nothing.

#include "accumulate/machine.h"
#include "base/format.h"
#include "base/names.h"

namespace moolink::accumulate {
using group::joined;

std::vector<std::string> Machine::waiting_for() const {
  if (phase_ == Phase::outside) return {};
  if (phase_ != Phase::active) return names_of(missing_in_flush());
  if (!leader_) return {};
  std::vector<Uid> instances = leader_->without_oldest();
  if (instances.empty()) instances = leader_->blocked_by(own_settings().virtual_batch_size);
  return names_of(instances);
}

std::string Machine::explain() const {
  if (phase_ == Phase::outside || !refused_.empty()) return {};
  if (phase_ != Phase::active) return explain_change();
  const std::string leader = "'" + name_of(leader_id_) + "'";
  if (!connected()) {
    return "the model's state from the leader " + leader +
           ": its loop must call update(), and set_state() when wants_state() is true";
  }
  if (leader_) return explain_as_leader();
  return "round " + std::to_string(ledger_.delivered() + 1) + " of the leader " + leader +
         ", whose log says whom it waits for";
}

std::string Machine::explain_change() const {
  const std::string change = " in membership change " + std::to_string(epoch_);
  const std::vector<std::string> missing = names_of(missing_in_flush());
  if (missing.empty()) return "the other members" + change;
  return joined(missing, "'") + change + ": no accumulator '" + joined_names_text(config_.group) +
         "' answers there; every member of the group must make one of this name, and keep it as "
         "long as it is a member";
}

std::string Machine::explain_as_leader() const {
  const std::int64_t whole = own_settings().virtual_batch_size;
  if (const auto lagging = leader_->without_oldest(); !lagging.empty()) {
    return joined(names_of(lagging), "'") + " to take part in the reduction of round " +
           std::to_string(leader_->stable() + 1) + ": is the process stopped, or the network slow?";
  }
  if (const auto blocking = leader_->blocked_by(whole); !blocking.empty()) {
    return joined(names_of(blocking), "'") +
           " to apply the rounds that are there: its loop must go on to the next turn of steps(), "
           "or call update(), step the optimiser and call zero_gradients()";
  }
  const std::string sum = gathered();
  const auto idle = leader_->without_gradients();
  if (idle.empty()) return "more contributions: " + sum + ", from every member";
  return "contributions: " + sum + ", none of " + joined(names_of(idle), "'") +
         "; the loop must call reduce_gradients() (step.reduce() in steps())";
}

std::string Machine::gathered() const {
  if (!leader_) return {};
  return "a batch of " + grouped(leader_->queued_batch()) + " of " +
         grouped(own_settings().virtual_batch_size) + " for round " +
         std::to_string(leader_->cut_round() + 1) + " is here";
}

}  // namespace moolink::accumulate
