#include "common/learner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/message_bytes.h"
#include "common/program.h"
#include "common/simulation.h"
#include "wire/archive.h"

namespace moolink::sim {

Learner::Learner(Registry& registry, Uid instance, Habits habits, std::uint64_t first_version)
    : registry_(&registry),
      instance_(instance),
      habits_(habits),
      node_(registry.root(first_version)) {}

void Learner::update(Time now, accumulate::Machine& machine, Random& random, bool contributing,
                     bool calm) {
  if (unwritten_) return write_on(now, machine, random, calm);
  machine.user_active(now);
  if (const auto version = machine.wants_state()) {
    require(*version == this->version(), "the state of version " + std::to_string(*version) +
                                             " is wanted at version " +
                                             std::to_string(this->version()));
    if (random.chance(1, 2)) machine.set_state(now, make_state());
  } else if (const auto state = machine.new_state(); state && !calm && random.chance(1, 30)) {
    machine.refuse_state(now, state->number);
    ++coverage["states refused"];
  } else if (state) {
    install(*state);
    machine.state_installed(now, state->number);
  } else if (const auto round = machine.next_result()) {
    apply(now, machine, *round, random);
  }
  // Its parameters are not the leader's any more, it says.
  const std::uint64_t seldom = machine.leader() ? 2000 : 100;  // without: in a change of epoch
  if (!calm && machine.connected() && !machine.is_leader() && random.chance(1, seldom)) {
    machine.resync(now);
    resynced_ = true;
    contributed_ = 0;  // as far behind as any newcomer
    ++coverage["resyncs"];
  }
  if (contributing && machine.wants_gradients(now) && random.below(100) < habits_.eager_percent) {
    contribute(now, machine, random);
  }
  if (machine.connected() && !machine.wants_state() && !machine.has_new_state()) {
    require(machine.model_version() == version(), "the model version is not the user's");
  }
}

void Learner::apply(Time now, accumulate::Machine& machine, const accumulate::Round& round,
                    Random& random) {
  const std::uint64_t number = round.number();
  check_withdrawn(round.record);
  if (round.result.empty()) {
    require(holding_ == number, "a result without bytes that was not taken");
    node_ = held_node_;
  } else if (round.may_take) {
    held_node_ = registry_->extend(node_, round);
    holding_ = number;
    // The user's own from now on: clipped, scaled, stepped with.
    const Buffer taken = machine.take_result(number);
    require(taken.size() == round.result.size(), "a result that may be taken cannot be");
    std::memset(const_cast<std::byte*>(taken.data()), 0x5a, taken.size());
    if (random.chance(1, 2)) return;  // takes its time
    node_ = held_node_;
  } else {
    node_ = registry_->extend(node_, round);
  }
  holding_ = 0;
  ++applied_;
  machine.delivered(now, number);
}

void Learner::contribute(Time now, accumulate::Machine& machine, Random& random) {
  require(!habits_.observer, "an observer is asked for gradients");
  // A machine may be in another epoch before this learner hears of it.
  require(known_epoch_ != machine.epoch() || known_round_ < version() + habits_.parallel_gradients,
          "gradients are wanted of parameters that are too old");
  ++contributed_;
  const bool skip = random.below(100) < habits_.skip_percent;
  const auto most = static_cast<std::uint64_t>(habits_.most_batch);
  const std::int64_t batch = skip ? 0 : 1 + static_cast<std::int64_t>(random.below(most));
  Counters counters;
  counters["steps"] = batch * 10 + (skip ? 1 : 0);
  if (random.chance(1, 4)) counters["episodes"] = static_cast<std::int64_t>(random.below(5)) - 2;
  const std::uint64_t k = next_k_++;
  registry_->offered(instance_, k, batch, counters);
  Buffer bucket = skip ? Buffer() : registry_->make_bucket(instance_, k);
  if (!skip && random.below(100) < habits_.unwritten_percent) {
    const MutableBuffer empty = HeapAllocator().allocate(bucket.size());
    std::memset(empty.data(), 0x5b, empty.size());
    unwritten_ = {k, empty, std::exchange(bucket, empty), std::make_shared<Progress>()};
    ++coverage["unwritten contributions"];
  }
  const auto progress = unwritten_ ? unwritten_->progress : nullptr;
  require(machine.offer(now, bucket, batch, counters, progress) == k,
          "contributions are not numbered in turn");
}

// Writes more of the offered bucket, or withdraws the contribution.
void Learner::write_on(Time now, accumulate::Machine& machine, Random& random, bool calm) {
  Unwritten& one = *unwritten_;
  if (!calm && random.chance(1, 50)) {
    machine.withdraw(now, one.k);
    withdrawn_.insert(one.k);
    dropped_.insert(one.k);
    std::memset(one.bucket.data() + one.progress->bytes(), 0x6b,
                one.bucket.size() - one.progress->bytes());
    unwritten_.reset();
    ++coverage["withdrawn contributions"];
    return;
  }
  const std::uint64_t from = one.progress->bytes();
  const std::uint64_t bytes =
      random.chance(1, 2) ? one.bucket.size() - from : random.below(one.bucket.size() - from);
  std::memcpy(one.bucket.data() + from, one.content.data() + from, bytes);
  one.progress->reach(from + bytes);
  if (from + bytes < one.bucket.size()) return;
  machine.written(now, std::exchange(unwritten_, std::nullopt)->k);
}

void Learner::check_withdrawn(const accumulate::RoundRecord& record) const {
  for (const accumulate::Contribution& contribution : record.contributions) {
    require(contribution.instance != instance_ || !withdrawn_.contains(contribution.k),
            "a round has a contribution that was withdrawn");
  }
}

void Learner::dropped(const std::vector<std::uint64_t>& k) { dropped_.insert(k.begin(), k.end()); }

// Parameters stand for the whole history that led to them: its node, and bytes made from that.
wire::Payload Learner::make_state() const {
  wire::Payload state;
  state.body = wire::encode(std::pair(node_, version()));
  state.parts.push_back(make_bytes(node_, 700 + node_ % 3000));
  state.parts.push_back(Buffer());
  state.parts.push_back(make_bytes(node_ + 1, 8));
  return state;
}

void Learner::install(const accumulate::NewState& state) {
  const auto [node, version] =
      wire::decode<std::pair<std::uint64_t, std::uint64_t>>(state.state.body.span());
  require(state.version == version && registry_->version(node) == version,
          "a snapshot of version " + std::to_string(version) + " came as " +
              std::to_string(state.version));
  require(state.state.parts.size() == 3 &&
              same_bytes(state.state.parts[0], make_bytes(node, 700 + node % 3000)) &&
              state.state.parts[1].empty() &&
              same_bytes(state.state.parts[2], make_bytes(node + 1, 8)),
          "a snapshot's bytes are not those that were sent");
  left_nodes_.push_back(node_);
  node_ = node;
  ++installed_;
}

bool Learner::was_overruled(std::uint64_t k) const {
  return std::any_of(left_nodes_.begin(), left_nodes_.end(), [&](std::uint64_t node) {
    return registry_->times_in(node, {instance_, k}) > 0;
  });
}

}  // namespace moolink::sim
