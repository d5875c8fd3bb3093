#include "runtime/accumulator_peer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crash_point.h"
#include "io/loop.h"

namespace moolink::runtime {
namespace {

constexpr std::size_t kSectionAlignment = 64;
constexpr Duration kStatePatience = seconds(5);

std::size_t section_bytes(const AccumulatorPeer::Section& section) {
  return section.count * tensor::item_size(section.dtype);
}

std::size_t aligned(std::size_t offset) {
  return (offset + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment;
}

std::size_t bucket_size(const std::vector<AccumulatorPeer::Section>& sections) {
  std::size_t size = 0;
  for (const auto& section : sections) size = aligned(size) + section_bytes(section);
  return size;
}

// FNV-1a: tells layouts apart; not against malice, which authentication keeps out.
std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

std::vector<collective::SharedSection> shared_sections(
    const std::vector<AccumulatorPeer::Section>& sections) {
  std::vector<collective::SharedSection> shared;
  std::size_t offset = 0;
  for (const auto& section : sections) {
    offset = aligned(offset);
    shared.push_back({section.dtype, offset, section.count});
    offset += section_bytes(section);
  }
  return shared;
}

accumulate::Machine::Config machine_config(const RpcPeer& rpc, const std::string& scope,
                                           const AccumulatorPeer::Options& options) {
  accumulate::Machine::Config config;
  config.group = scope;
  config.instance = rpc.instance();
  config.name = rpc.name_locked();
  config.role = options.observer ? group::Role::observer : group::Role::member;
  config.bucket_bytes = bucket_size(options.sections);
  config.layout = hash_of(options.layout);
  config.layout_text = options.layout;
  config.memory = {rpc.context(), &rpc.context()->pool()};
  return config;
}

}  // namespace

AccumulatorPeer::AccumulatorPeer(std::shared_ptr<GroupPeer> group, Options options)
    : group_(std::move(group)),
      rpc_(group_->rpc()),
      scope_(group_->name() + "/" + options.name),
      sections_(options.sections),
      bucket_bytes_(bucket_size(sections_)),
      machine_(machine_config(*rpc_, scope_, options)) {
  const Engine::Lock lock = rpc_->context()->lock();
  for (const rpc::Service service : {rpc::Service::accumulate, rpc::Service::snapshot}) {
    rpc_->router().add(service, scope_,
                       [this, service](const Uid& from, const wire::Payload& payload) {
                         const Time now = io::now();
                         machine_.received(now, from, static_cast<std::uint8_t>(service), payload);
                         carry_out(now);
                       });
  }
  runner_ = OperationRunner::create(
      rpc_, "rounds:" + scope_,
      {{}, [this](collective::Engine::Done done) { section_done(std::move(done)); }});
  shared_ =
      SharedRounds::create(rpc_, "segments:" + scope_, shared_sections(sections_), bucket_bytes_,
                           {[this](std::uint64_t epoch) { machine_.shared_ready(epoch); },
                            [this](std::uint64_t epoch, std::uint64_t round, Buffer result) {
                              reduced(epoch, round, std::move(result));
                            },
                            [this](std::uint64_t epoch, std::uint64_t round, const Error& error) {
                              not_reduced(epoch, round, error);
                            }});
  rpc_->context()->engine().add(*this);
  const Time now = io::now();
  group_->add(now, *this);
  settle(now);
}

AccumulatorPeer::~AccumulatorPeer() { close(); }

void AccumulatorPeer::close() {
  if (rpc_->context()->abandoned()) return;
  const Engine::Lock lock = rpc_->context()->lock();
  if (std::exchange(closed_, true)) return;
  runner_->close();
  shared_->close();
  for (const rpc::Service service : {rpc::Service::accumulate, rpc::Service::snapshot}) {
    rpc_->router().remove(service, scope_);
  }
  group_->remove(*this);
  rpc_->context()->engine().remove(*this);
  wake();
}

Engine::Lock AccumulatorPeer::lock_open() {
  Engine::Lock lock = rpc_->context()->lock();
  if (closed_) {
    throw Exception(ErrorCode::closed, "the accumulator '" + scope_ + "' was closed");
  }
  return lock;
}

// --- what the user sees

void AccumulatorPeer::update(bool raise_on_divergence) {
  const Engine::Lock lock = lock_open();
  const Time now = io::now();
  news_ = false;
  machine_.user_active(now);
  settle(now);
  look(now);
  if (failure_) throw Exception(failure_);
  if (const Error divergence = std::exchange(divergence_, {})) {
    if (raise_on_divergence) throw Exception(divergence);
    rpc_->context()->log(LogLevel::warning, divergence.message);
  }
}

void AccumulatorPeer::look(Time now) {
  seen_.connected = machine_.connected();
  seen_.wants_state = machine_.wants_state().has_value();
  seen_.has_new_state = machine_.has_new_state();
  seen_.wants_gradients = machine_.wants_gradients(now);
  seen_.result = machine_.next_result();
  if (seen_.result) {
    stats_.record = seen_.result->record;
    stats_.gradients = seen_.result->gradients();
    stats_.skipped = seen_.result->skipped();
    stats_.contributors = seen_.result->contributors();
  }
  // A result is delivered with the update() that shows it, before the user has applied it.
  seen_.version = seen_.result ? seen_.result->number() : machine_.model_version();
  seen_.leader = machine_.leader().value_or("");
  seen_.is_leader = machine_.is_leader();
  if (!seen_.wants_state) state_wanted_at_ = kNever;
}

bool AccumulatorPeer::wait(Time deadline, const Engine::Interrupt& interrupt) {
  Engine::Lock lock = lock_open();
  if (news_) return true;
  Waiter waiter;
  waiters_.push_back(&waiter);
  struct Forget {
    std::vector<Waiter*>& waiters;
    Waiter* waiter;
    ~Forget() { std::erase(waiters, waiter); }
  } const forget{waiters_, &waiter};
  return rpc_->context()->wait(lock, waiter, deadline, interrupt);
}

void AccumulatorPeer::wake() {
  news_ = true;
  for (Waiter* waiter : waiters_) rpc_->context()->engine().finish(*waiter);
}

bool AccumulatorPeer::state_overdue() const {
  return seen_.wants_state && state_wanted_at_ != kNever &&
         io::now() - state_wanted_at_ > kStatePatience;
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

// --- what the user does

void AccumulatorPeer::set_model_version(std::uint64_t version) {
  const Engine::Lock lock = lock_open();
  machine_.set_model_version(version);
  settle(io::now());
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
  if (bucket_.empty()) bucket_ = rpc_->context()->pool().allocate(bucket_bytes_);
  return bucket_;
}

void AccumulatorPeer::offer(std::int64_t batch, accumulate::Counters counters) {
  const Engine::Lock lock = lock_open();
  const Time now = io::now();
  machine_.offer(now, batch > 0 ? Buffer(std::exchange(bucket_, {})) : Buffer(), batch,
                 std::move(counters));
  settle(now);
  seen_.wants_gradients = machine_.wants_gradients(now);
}

void AccumulatorPeer::set_state(wire::Payload state) {
  const Engine::Lock lock = lock_open();
  const Time now = io::now();
  if (!machine_.wants_state()) {
    throw Exception(ErrorCode::error, "set_state was called while wants_state() is false");
  }
  machine_.set_state(now, std::move(state));
  settle(now);
  look(now);
}

wire::Payload AccumulatorPeer::take_state() {
  const Engine::Lock lock = lock_open();
  const Time now = io::now();
  auto state = machine_.new_state();
  if (!state) throw Exception(ErrorCode::error, "no new state has arrived");
  machine_.state_installed(now);
  settle(now);
  look(now);
  return std::move(state->state);
}

void AccumulatorPeer::release_result() {
  const Engine::Lock lock = lock_open();
  if (!seen_.result) return;
  const Time now = io::now();
  const std::uint64_t round = seen_.result->number();
  seen_.result.reset();
  machine_.delivered(now, round);
  settle(now);
  seen_.version = machine_.model_version();
  seen_.wants_gradients = machine_.wants_gradients(now);
}

void AccumulatorPeer::checksum(std::uint64_t round, std::uint64_t value) {
  const Engine::Lock lock = lock_open();
  machine_.checksum(io::now(), round, value);
  settle(io::now());
}

// --- events

void AccumulatorPeer::new_view(Time now, const group::View& view) {
  machine_.view(now, view);
  carry_out(now);
}

void AccumulatorPeer::evicted(Time now) {
  machine_.evicted(now);
  carry_out(now);
}

void AccumulatorPeer::tick(Time now) {
  shared_->tick(now);
  machine_.tick(now);
  carry_out(now);
}

// After an event from outside of the loop.
void AccumulatorPeer::settle(Time now) {
  carry_out(now);
  rpc_->flush();
  rpc_->context()->engine().rearm(std::min(next_deadline(), rpc_->next_deadline()));
}

void AccumulatorPeer::carry_out(Time now) {
  for (auto actions = machine_.take_actions(); !actions.empty();
       actions = machine_.take_actions()) {
    for (accumulate::Machine::Action& action : actions) perform(now, action);
  }
  runner_->carry_out();
}

void AccumulatorPeer::perform(Time now, accumulate::Machine::Action& action) {
  using accumulate::Machine;
  if (auto* send = std::get_if<Machine::Send>(&action)) {
    rpc_->router().send(send->instance, send->name, static_cast<rpc::Service>(send->service),
                        std::move(send->payload));
  } else if (auto* enter = std::get_if<Machine::EnterEpoch>(&action)) {
    shared_->enter(now, {enter->epoch, enter->instances, enter->names, enter->one_host});
    runner_->engine().set_members(
        {enter->epoch, std::move(enter->instances), std::move(enter->names)},
        {ErrorCode::group_changed, "the group changed", {}, scope_, {}, {}, Ran::maybe});
  } else if (auto* reduction = std::get_if<Machine::Reduce>(&action)) {
    reduce(now, *reduction);
  } else if (std::get_if<Machine::WantState>(&action) != nullptr) {
    state_wanted_at_ = now;
    wake();
  } else if (auto* lost = std::get_if<Machine::Lost>(&action)) {
    std::ranges::move(lost->contributions, std::back_inserter(stats_.lost));
  } else if (auto* divergence = std::get_if<Machine::Divergence>(&action)) {
    std::string names;
    for (const std::string& name : divergence->names) names += " '" + name + "'";
    divergence_ = {ErrorCode::error,
                   "the parameters of" + names + " differ from the leader's after round " +
                       std::to_string(divergence->round) +
                       ": do all peers use the same optimiser, settings and library versions?",
                   {},
                   scope_,
                   {},
                   {},
                   Ran::no};
    wake();
  } else if (auto* demote = std::get_if<Machine::Demote>(&action)) {
    rpc_->context()->log(LogLevel::warning, "accumulator '" + scope_ + "': peer '" + demote->name +
                                                "' becomes a newcomer: " + demote->reason);
    group_->member().ask_demotion(now, demote->instance);
  } else if (auto* failed = std::get_if<Machine::Failed>(&action)) {
    failure_ = std::move(failed->error);
    wake();
  } else if (std::get_if<Machine::Wake>(&action) != nullptr) {
    wake();
  } else if (auto* log = std::get_if<Machine::Log>(&action)) {
    rpc_->context()->log(log->level, "accumulator '" + scope_ + "': " + log->text);
  }
}

// --- rounds

void AccumulatorPeer::reduce(Time now, accumulate::Machine::Reduce& action) {
  if (action.shared != 0) {
    shared_->reduce({action.epoch, action.shared, action.round, action.total,
                     std::move(action.inputs), std::move(action.contributors),
                     std::move(action.reducers)});
    return;
  }
  const std::uint64_t key = next_reduction_++;
  Reduction reduction{action.epoch, action.round, std::vector<Buffer>(sections_.size()),
                      sections_.size()};
  reductions_.emplace(key, std::move(reduction));
  std::size_t offset = 0;
  for (std::size_t index = 0; index < sections_.size(); ++index) {
    const Section& section = sections_[index];
    offset = aligned(offset);
    collective::OpSpec spec;
    spec.dtype = section.dtype;
    spec.divisor = static_cast<double>(action.total);
    spec.shape = {static_cast<std::int64_t>(section.count)};
    spec.contributors = action.contributors;
    spec.reducers = action.reducers;
    std::vector<Buffer> inputs;
    for (const Buffer& input : action.inputs) {
      inputs.push_back(input.slice(offset, section_bytes(section)));
    }
    try {
      const collective::OpId op =
          runner_->engine().start("round", std::move(spec), std::move(inputs),
                                  {false, action.round * sections_.size() + index});
      operations_[op] = {key, index};
    } catch (const Exception& e) {
      reductions_.erase(key);
      machine_.reduce_failed(now, action.epoch, action.round, e.error());
      return;
    }
    offset += section_bytes(section);
  }
}

void AccumulatorPeer::section_done(collective::Engine::Done done) {
  const auto operation = operations_.find(done.op);
  if (operation == operations_.end()) return;
  const auto [key, index] = operation->second;
  operations_.erase(operation);
  const auto found = reductions_.find(key);
  if (found == reductions_.end()) return;
  if (done.error) {
    const Reduction failed = std::move(found->second);
    reductions_.erase(found);
    // A change of the group is the machine's own doing.
    if (done.error.code == ErrorCode::group_changed) return;
    not_reduced(failed.epoch, failed.round, done.error);
    return;
  }
  found->second.sections[index] = std::move(done.tensor);
  if (--found->second.missing == 0) {
    Reduction reduction = std::move(found->second);
    reductions_.erase(found);
    finish(std::move(reduction));
  }
}

void AccumulatorPeer::finish(Reduction reduction) {
  Buffer result = std::move(reduction.sections.front());
  if (sections_.size() > 1) {
    const MutableBuffer whole = rpc_->context()->pool().allocate(bucket_bytes_);
    std::size_t offset = 0;
    reduction.sections.front() = std::move(result);
    for (const Buffer& section : reduction.sections) {
      offset = aligned(offset);
      std::memcpy(whole.data() + offset, section.data(), section.size());
      offset += section.size();
    }
    result = whole;
  }
  reduced(reduction.epoch, reduction.round, std::move(result));
}

void AccumulatorPeer::reduced(std::uint64_t epoch, std::uint64_t round, Buffer result) {
  const Time now = io::now();
  machine_.reduced(now, epoch, round, std::move(result));
  carry_out(now);
}

void AccumulatorPeer::not_reduced(std::uint64_t epoch, std::uint64_t round, const Error& error) {
  machine_.reduce_failed(io::now(), epoch, round, error);
  carry_out(io::now());
}

}  // namespace moolink::runtime
