#include "runtime/group/accumulator_peer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/barrier.h"
#include "base/format.h"
#include "base/names.h"
#include "base/scoped.h"
#include "io/loop.h"

namespace moolink::runtime {
namespace {

constexpr Duration kStateTimeout = seconds(5);

// FNV-1a: distinguishes layouts; no protection against malice, which authentication keeps out.
std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

accumulate::Config machine_config(const RpcPeer& rpc, const std::string& group,
                                  const AccumulatorPeer::Options& options,
                                  const BucketLayout& bucket) MOOLINK_LOCKED {
  check_name("an accumulator's name", options.name);
  accumulate::Config config;
  config.group = join_names({group, options.name});
  config.instance = rpc.instance();
  config.name = rpc.node().name();
  config.role = options.role;
  config.bucket_bytes = bucket.bytes;
  config.layout = hash_of(options.layout);
  config.layout_text = options.layout;
  config.memory = {rpc.context(), &rpc.context()->transient()};
  return config;
}

}  // namespace

AccumulatorPeer::AccumulatorPeer(std::shared_ptr<GroupPeer> group, Options options)
    : AccumulatorPeer(group->rpc()->context()->lock(), group, std::move(options)) {}

AccumulatorPeer::AccumulatorPeer(const Engine::Lock& /*held*/, std::shared_ptr<GroupPeer> group,
                                 Options options)
    : group_(std::move(group)),
      rpc_(group_->rpc()),
      scope_(group_->name() + "/" + options.name),
      layout_(options.sections),
      kept_{rpc_->context()->pool().keep_one(layout_.bytes),
            rpc_->context()->lending().keep_one(layout_.bytes)},
      machine_(machine_config(*rpc_, group_->name(), options, layout_)),
      moved_at_(io::now()),
      called_at_(moved_at_) {
  if (layout_.bytes == 0) {
    throw Exception(ErrorCode::invalid_argument,
                    "the parameters of accumulator '" + options.name +
                        "' have no elements: pass at least one that has");
  }
  group_->check_role(options.role);
  const Time now = io::now();
  register_services(options.name);
  driven_ = rpc_->context()->engine().add(*this);
  try {
    group_->add(now, *this, options.role);
    settle(now);
  } catch (...) {
    group_->remove(now, *this);
    throw;
  }
}

AccumulatorPeer::~AccumulatorPeer() { close(); }

void AccumulatorPeer::register_services(const std::string& name) {
  const std::string& group = group_->name();
  for (const rpc::Service service : {rpc::Service::accumulate, rpc::Service::snapshot}) {
    routed_.push_back(rpc_->router().route(
        service, join_names({group, name}), group,
        [this, service](const Uid& from, const wire::Payload& payload) MOOLINK_LOCKED {
          const Time now = io::now();
          group_->event_from([&]() MOOLINK_LOCKED {
            machine_.received(now, from, static_cast<std::uint8_t>(service), payload);
          });
          carry_out(now);
        }));
  }
  runner_ = std::make_shared<OperationRunner>(
      rpc_, group, join_names({"rounds", group, name}),
      OperationRunner::Segment{join_names({"segments", group, name}), "rounds",
                               rpc::Service::accumulate},
      OperationRunner::Events{
          {},
          [this](collective::Engine::Done done) MOOLINK_LOCKED { section_done(std::move(done)); },
          [this](const Error& error) MOOLINK_LOCKED { group_->start_over(error); },
          [this](std::uint64_t epoch) MOOLINK_LOCKED { machine_.shared_ready(epoch); },
          [this](const Error& error) MOOLINK_LOCKED { fail_reductions(error); }});
}

void AccumulatorPeer::close() {
  if (rpc_->context()->abandoned()) return;
  const Engine::Lock lock = rpc_->context()->lock();
  if (std::exchange(closed_, true)) return;
  runner_->close();
  routed_.clear();
  guard([this]() MOOLINK_LOCKED { group_->remove(io::now(), *this); },
        [this](const Error& error) MOOLINK_LOCKED { group_->start_over(error); });
  rpc_->settle(group_->next_deadline());
  driven_.reset();
  bucket_ = {};
  kept_ = {};
  wake();
}

Engine::Lock AccumulatorPeer::lock_open() MOOLINK_UNCHECKED {
  Engine::Lock lock = rpc_->context()->lock();
  if (closed_ || group_->closed()) {
    throw Exception(ErrorCode::closed, (closed_ ? "the accumulator '" + scope_
                                                : "the group of accumulator '" + scope_) +
                                           "' was closed");
  }
  return lock;
}

// An event from the user, at the time returned, behind the exception barrier. A refusal changes
// nothing; any other error leaves the machine in the middle of it, so this peer starts over.
template <class Event>
Time AccumulatorPeer::from_user(Event&& event) {
  const Time now = io::now();
  try {
    event(now);
  } catch (...) {
    const Error error = current_error();
    if (error.code == ErrorCode::error) group_->start_over(error);
    rpc_->settle(group_->next_deadline());
    throw;
  }
  settle(now);
  return now;
}

// --- the user's view

void AccumulatorPeer::update(OnDivergence on_divergence) {
  const Engine::Lock lock = lock_open();
  news_ = false;
  const Time now = called_at_ =
      from_user([&](Time at) MOOLINK_LOCKED { machine_.user_active(at); });
  look(now);
  if (failure_) throw Exception(failure_);
  group_->throw_refusal();
  remind(now);
  if (const Error divergence = std::exchange(divergence_, {})) {
    const bool here = std::exchange(diverged_here_, false);
    if (on_divergence == OnDivergence::raise) throw Exception(divergence);
    rpc_->context()->log(LogLevel::warning, divergence.message);
    if (on_divergence != OnDivergence::resync || !here) return;
    look(from_user([&](Time at) MOOLINK_LOCKED { machine_.resync(at); }));
  }
}

void AccumulatorPeer::look(Time now) {
  seen_.connected = machine_.connected();
  seen_.wants_state = machine_.wants_state().has_value();
  seen_.has_new_state = machine_.has_new_state();
  seen_.wants_gradients = machine_.wants_gradients(now);
  seen_.result = machine_.next_result();
  if (!seen_.result || seen_.result->number() != shown_) shown_.reset();
  seen_.version = shown_.value_or(machine_.model_version());
  seen_.is_everywhere = machine_.is_everywhere();
  seen_.leader = machine_.leader().value_or("");
  seen_.is_leader = machine_.is_leader();
  // The user's time to answer begins when the user is asked, not when newcomers arrive.
  if (!seen_.wants_state) seen_.state_wanted_at = kNever;
  if (seen_.wants_state && seen_.state_wanted_at == kNever) seen_.state_wanted_at = now;
}

void AccumulatorPeer::set_awaited(std::string text) {
  const Engine::Lock lock = lock_open();
  awaited_ = std::move(text);
}

// Tells a user that polls why nothing happens.
void AccumulatorPeer::remind(Time now) {
  if (seen_.result || seen_.has_new_state || seen_.wants_state) moved_at_ = now;
  if (now < reminder_.next(moved_at_)) return;
  const std::string text = explain(now);
  if (text.empty()) return;
  reminder_.due(moved_at_, now);
  rpc_->context()->log(LogLevel::warning, "accumulator '" + scope_ + "' of peer '" +
                                              rpc_->node().name() + "' waits for " +
                                              in_seconds(now - moved_at_) + " for " + text);
}

// What the accumulator waits for, and what to do; empty while the group itself waits and logs it.
std::string AccumulatorPeer::explain(Time now) const {
  if (!awaited_.empty()) return awaited_;
  if (!machine_.wants_gradients(now)) return machine_.explain();
  return "gradients of this peer: compute them (backward()), and call reduce_gradients() or, in "
         "steps(), step.reduce()";
}

// The update() that shows a round delivers it, before the user has applied it.
void AccumulatorPeer::show(Time now, const accumulate::Round& round) {
  shown_ = seen_.version = round.number();
  stats_.record = round.record;
  const accumulate::RoundTimes& times = round.times;
  const bool contributed = times.offered != kNever;
  stats_.phases = {contributed ? times.cut - times.offered : Duration{-1},
                   times.reduced - times.cut, now - times.reduced};
  stats_.lost = std::exchange(lost_, {});
  stats_.contributors.clear();
  stats_.contributions.clear();
  stats_.staleness.clear();
  for (const accumulate::Contribution& one : round.record.contributions) {
    if (one.batch <= 0) continue;
    if (++stats_.contributions[one.name] == 1) stats_.contributors.push_back(one.name);
    const std::uint64_t newest = round.number() - 1;  // the newest before this round
    stats_.staleness.push_back(newest - std::min(newest, one.version));
  }
}

void AccumulatorPeer::describe(Time now, Describe how, std::string& text) const {
  const std::string who = "accumulator '" + scope_ + "' of peer '" + rpc_->node().name() + "'";
  if (how == Describe::everything) {
    text += who + ": model version " + std::to_string(machine_.model_version()) + ", leader '" +
            machine_.leader().value_or("none") + "'" +
            (machine_.connected() ? "" : ", not in possession of the state") +
            (machine_.wants_state() ? ", the user is asked for set_state()" : "") +
            (machine_.has_new_state() ? ", a new state waits for the user" : "") +
            (machine_.next_result() ? ", a result waits for the user" : "") +
            (machine_.wants_gradients(now) ? ", gradients are wanted of the user" : "") +
            (machine_.is_leader() ? ", " + machine_.gathered() : "") + "\n";
  }
  const std::vector<std::string> waiting = machine_.waiting_for();
  if (waiting.empty()) return;
  text += who + " waits for:";
  for (const std::string& name : waiting) text += " '" + name + "'";
  text += '\n';
}

bool AccumulatorPeer::wait(Time deadline, const Engine::Interrupt& interrupt) {
  Engine::Lock lock = lock_open();
  if (news_) return true;
  Waiter waiter;
  waiter.what = "an accumulator's news";
  waiter.explain = [this](Time now) MOOLINK_LOCKED {
    const std::string text = explain(now);
    return text.empty() ? text : text + " (accumulator '" + scope_ + "')";
  };
  const Listed listed(waiters_, waiter);
  return rpc_->context()->wait(lock, waiter, deadline, interrupt);
}

void AccumulatorPeer::wake() {
  news_ = true;
  for (Waiter* waiter : waiters_) rpc_->context()->engine().finish(*waiter);
}

bool AccumulatorPeer::state_overdue() const {
  return seen_.wants_state && seen_.state_wanted_at != kNever &&
         io::now() - seen_.state_wanted_at > kStateTimeout;
}

std::string AccumulatorPeer::why_not_wanted() {
  const Engine::Lock lock = lock_open();
  if (!machine_.connected()) {
    const std::string waiting = group_->member().waiting_for();
    return "this peer is not connected yet" + (waiting.empty() ? "" : " (" + waiting + ")");
  }
  if (machine_.wants_state()) return "newcomers wait for set_state()";
  return "its contribution waits for the round to be cut, or results wait to be used";
}

AccumulatorPeer::Stats AccumulatorPeer::stats() {
  const Engine::Lock lock = lock_open();
  Stats stats = stats_;
  stats.waiting_for = machine_.waiting_for();
  return stats;
}

AccumulatorPeer::Activity AccumulatorPeer::activity() {
  const Engine::Lock lock = lock_open();
  const Time now = io::now();
  return {waiters_.empty() ? now - called_at_ : Duration{}, now - moved_at_, explain(now)};
}

// --- the user's actions

void AccumulatorPeer::set_model_version(std::uint64_t version) {
  const Engine::Lock lock = lock_open();
  from_user([&](Time) MOOLINK_LOCKED { machine_.set_model_version(version); });
  seen_.version = machine_.model_version();
}

void AccumulatorPeer::set_virtual_batch_size(std::int64_t size) {
  const Engine::Lock lock = lock_open();
  machine_.set_virtual_batch_size(size);
  settle(io::now());
}

void AccumulatorPeer::set_parallel_gradients(std::uint32_t rounds) {
  const Engine::Lock lock = lock_open();
  machine_.set_parallel_gradients(rounds);
  settle(io::now());
}

MutableBuffer AccumulatorPeer::bucket() {
  const Engine::Lock lock = lock_open();
  if (bucket_.empty()) bucket_ = runner_->input(layout_.bytes);
  return bucket_;
}

void AccumulatorPeer::offer(std::int64_t batch, accumulate::Counters counters) {
  const Engine::Lock lock = lock_open();
  if (unwritten_) throw Exception(ErrorCode::error, "the last contribution is still being written");
  offer_bucket(batch, std::move(counters), batch > 0 ? Buffer(bucket_) : Buffer(), {});
  if (batch > 0) bucket_ = {};
}

void AccumulatorPeer::offer_unwritten(std::int64_t batch, accumulate::Counters counters) {
  const Buffer bucket = this->bucket();
  const Engine::Lock lock = lock_open();
  if (unwritten_) throw Exception(ErrorCode::error, "the last contribution is still being written");
  offer_bucket(batch, std::move(counters), bucket, std::make_shared<Progress>());
}

void AccumulatorPeer::offer_bucket(std::int64_t batch, accumulate::Counters counters, Buffer bucket,
                                   const std::shared_ptr<Progress>& progress) {
  const Time now = from_user([&](Time at) MOOLINK_LOCKED {
    const std::uint64_t k =
        machine_.offer(at, std::move(bucket), batch, std::move(counters), progress);
    if (progress) unwritten_ = {k, progress};
  });
  moved_at_ = called_at_ = now;
  seen_.wants_gradients = machine_.wants_gradients(now);
}

void AccumulatorPeer::written(std::size_t bytes) {
  const Engine::Lock lock = lock_open();
  if (!unwritten_) return;
  unwritten_->progress->reach(bytes);
  const std::uint64_t k = unwritten_->k;
  const bool is_whole = bytes == layout_.bytes;
  if (is_whole) {
    unwritten_.reset();
    bucket_ = {};
  }
  const Time now = from_user([&](Time at) MOOLINK_LOCKED {
    runner_->inputs_written();
    if (is_whole) machine_.written(at, k);
  });
  moved_at_ = called_at_ = now;
}

void AccumulatorPeer::withdraw() {
  const Engine::Lock lock = lock_open();
  if (!unwritten_) return;
  const std::uint64_t k = std::exchange(unwritten_, std::nullopt)->k;
  bucket_ = {};
  const Time now = from_user([&](Time at) MOOLINK_LOCKED { machine_.withdraw(at, k); });
  seen_.wants_gradients = machine_.wants_gradients(now);
}

void AccumulatorPeer::set_state(wire::Payload state) {
  const Engine::Lock lock = lock_open();
  // Shown as wanted: if the members have changed since, the machine asks again.
  if (!seen_.wants_state) {
    throw Exception(ErrorCode::error, "set_state was called while wants_state() is false");
  }
  look(from_user([&](Time now) MOOLINK_LOCKED { machine_.set_state(now, std::move(state)); }));
}

std::optional<accumulate::NewState> AccumulatorPeer::new_state() {
  const Engine::Lock lock = lock_open();
  return machine_.new_state();
}

void AccumulatorPeer::state_installed(std::uint64_t number) {
  const Engine::Lock lock = lock_open();
  look(from_user([&](Time now) MOOLINK_LOCKED { machine_.state_installed(now, number); }));
}

void AccumulatorPeer::refuse_state(std::uint64_t number) {
  const Engine::Lock lock = lock_open();
  look(from_user([&](Time now) MOOLINK_LOCKED { machine_.refuse_state(now, number); }));
}

MutableBuffer AccumulatorPeer::take_result() {
  Buffer result;
  {
    const Engine::Lock lock = lock_open();
    if (!seen_.result) return {};
    result = std::exchange(seen_.result->result, {});
    if (!result.empty()) show(io::now(), *seen_.result);
    if (seen_.result->may_take && !machine_.take_result(seen_.result->number()).empty()) {
      return {std::const_pointer_cast<void>(result.owner()), const_cast<std::byte*>(result.data()),
              result.size()};
    }
  }
  if (result.empty()) return {};
  // Others may still be given this one.
  const MutableBuffer copy = rpc_->context()->pool().allocate(result.size());
  std::memcpy(copy.data(), result.data(), result.size());
  return copy;
}

void AccumulatorPeer::release_result() {
  const Engine::Lock lock = lock_open();
  if (!seen_.result) return;
  const std::uint64_t round = seen_.result->number();
  seen_.result.reset();
  shown_.reset();
  const Time now = from_user([&](Time at) MOOLINK_LOCKED { machine_.delivered(at, round); });
  moved_at_ = called_at_ = now;
  seen_.version = machine_.model_version();
  seen_.wants_gradients = machine_.wants_gradients(now);
}

void AccumulatorPeer::checksum(std::uint64_t round, std::uint64_t value) {
  const Engine::Lock lock = lock_open();
  from_user([&](Time now) MOOLINK_LOCKED { machine_.checksum(now, round, value); });
}

// --- events

void AccumulatorPeer::new_view(Time now, const group::SharedView& view) {
  machine_.view(now, view);
  carry_out(now);
}

void AccumulatorPeer::evicted(Time now) {
  machine_.evicted(now);
  carry_out(now);
}

void AccumulatorPeer::tick(Time now) {
  const auto act = [&]() MOOLINK_LOCKED {
    runner_->tick(now);
    machine_.tick(now);
  };
  guard(act, [this](const Error& error) MOOLINK_LOCKED { group_->start_over(error); });
  carry_out(now);
}

// After an event from outside the loop.
void AccumulatorPeer::settle(Time now) {
  carry_out(now);
  rpc_->settle(next_deadline());
}

void AccumulatorPeer::carry_out(Time now) {
  pump_.run([this]() MOOLINK_LOCKED { return machine_.take_actions(); },
            [&](auto& action) MOOLINK_LOCKED { perform(now, action); },
            [&](const auto& action, const Error& error) MOOLINK_LOCKED { end(action, error); });
  runner_->carry_out();
}

}  // namespace moolink::runtime
