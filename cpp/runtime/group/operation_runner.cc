#include "runtime/group/operation_runner.h"

#include <algorithm>
#include <utility>

#include "base/barrier.h"
#include "base/crash_point.h"
#include "runtime/peer/service_router.h"

namespace moolink::runtime {
namespace {

// Below this the arithmetic is quicker than waking another thread for it.
constexpr std::size_t kSumHereBytes = std::size_t{64} << 10;
// Below this, windows are faster than waiting until all ranks have read.
constexpr std::uint64_t kLeastLentBytes = std::uint64_t{1} << 20;
// After that, other threads may have the engine's lock; the work continues in the next turn.
constexpr Duration kPollTime = microseconds(200);

bool may_be_lent(const collective::PipelineOperation& operation) {
  return !operation.abandoned && operation.passage.kind == collective::Kind::all_reduce &&
         operation.inputs.size() == 1 && operation.output.size() >= kLeastLentBytes;
}

std::shared_ptr<Allocator> pool_of(const std::shared_ptr<Context>& context) {
  return {context, &context->pool()};
}

}  // namespace

OperationRunner::OperationRunner(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope,
                                 const Segment& segment, Events events)
    : rpc_(std::move(rpc)),
      group_(std::move(group)),
      scope_(std::move(scope)),
      events_(std::move(events)),
      engine_({scope_, rpc_->instance(), pool_of(rpc_->context())}),
      segment_(rpc_, group_, segment.scope,
               {segment.what, segment.service, [this]() MOOLINK_LOCKED { attach(); },
                [this]() MOOLINK_LOCKED { events_.shares(segment_.epoch()); }}),
      routed_(rpc_->router().route(rpc::Service::collective, scope_, group_,
                                   [this](const Uid& from, const wire::Payload& payload)
                                       MOOLINK_LOCKED {
                                         engine_.received(from, payload);
                                         carry_out();
                                       })),
      observes_(rpc_->add(*this)),
      polled_(rpc_->context()->engine().loop().add(*this)) {}

OperationRunner::~OperationRunner() {
  if (!rpc_->context()->abandoned()) close();
}

void OperationRunner::close() {
  if (!std::exchange(routed_, nullptr)) return;
  engine_.drop_operations();
  if (pipeline_) pipeline_->withdraw();
  pipeline_.reset();
  ended_.clear();
  segment_.close();
  observes_.reset();
  polled_.reset();
}

void OperationRunner::enter(Time now, const collective::SharedMembers& members,
                            const Error& reason) {
  leave_segment();  // so that the operations that fail below do not use it
  engine_.set_members(members, reason);
  carry_out();
  segment_.enter(now, members);
}

MutableBuffer OperationRunner::input(std::size_t bytes) {
  Context& context = *rpc_->context();
  if (!pipeline_) return context.pool().allocate(bytes);
  try {
    return context.lending().allocate(bytes);
  } catch (const std::bad_alloc&) {  // such as without a descriptor: it passes through windows
    return context.pool().allocate(bytes);
  }
}

void OperationRunner::inputs_written() {
  engine_.inputs_written();
  carry_out();
  rpc_->context()->engine().loop().wake();  // the pipeline reads the progress itself
}

std::vector<std::string> OperationRunner::waiting_for(collective::OpId op) const {
  std::vector<std::string> names = engine_.waiting_for(op);  // also on other hosts
  if (!pipeline_ || !engine_.in_shared_memory(op)) return names;
  for (const std::uint32_t rank : pipeline_->waiting_for()) names.push_back(segment_.name(rank));
  return names;
}

void OperationRunner::carry_out() {
  if (const Error failure = engine_.take_failure()) events_.broken(failure);
  const auto take = [this] {
    return routed_ ? engine_.take_actions() : std::vector<collective::Engine::Action>();
  };
  pump_.run(
      take, [this](auto& action) MOOLINK_LOCKED { perform(action); },
      [this](const auto& action, const Error& error) MOOLINK_LOCKED { end(action, error); });
}

void OperationRunner::perform(collective::Engine::Send& action) {
  rpc_->send_service_to(action.instance, action.name, rpc::Service::collective,
                        std::move(action.payload), group_);
  crash_point("slice.sent");
}

void OperationRunner::perform(collective::Engine::Sum& action) {
  if (action.work.bytes() > kSumHereBytes) {
    const auto submit = [&]() MOOLINK_LOCKED { submit_sum(action); };
    if (guard(submit, [this](const Error& error) MOOLINK_LOCKED { no_thread(error); })) return;
  }
  collective::run(action.work);
  engine_.summed(action.op, action.run, action.id);
}

// The task runs on this thread, which delays the network.
void OperationRunner::no_thread(const Error& error) {
  if (std::exchange(lacks_thread_, true)) return;
  rpc_->context()->log(LogLevel::warning, "group '" + group_ +
                                              "': no thread for large reductions, which are slow "
                                              "therefore: " +
                                              error.message);
}

void OperationRunner::submit_sum(const collective::Engine::Sum& action) {
  rpc_->context()->compute().submit([self = shared_from_this(), sum = action] {
    Error error;
    guard([&] { collective::run(sum.work); }, [&](const Error& why) { error = why; });
    const Engine::Lock lock = self->rpc_->context()->lock();
    if (!self->routed_) return;
    const auto go_on = [&] {
      if (error) throw Exception(error);
      self->engine_.summed(sum.op, sum.run, sum.id);
    };
    guard(go_on, [&](const Error& why) MOOLINK_LOCKED { self->end(sum, why); });
    self->carry_out();
    self->rpc_->settle();
  });
}

void OperationRunner::end(const collective::Engine::Sum& action, const Error& error) {
  // An operation whose result is being put in its place cannot be cancelled any more.
  if (action.id == collective::kResult) return events_.broken(error);
  engine_.cancel(action.op, error);
}

// --- through the segment

void OperationRunner::attach() {
  pipeline_ = std::make_unique<collective::SharedPipeline>(
      collective::PipelineSegment(segment_.segment(), segment_.segment()->bytes(),
                                  segment_.layout()),
      segment_.rank(), rpc_->context()->pool(),
      [this](std::uint32_t rank, std::uint64_t number)
          MOOLINK_LOCKED { return lent_by(rank, number); });
}

void OperationRunner::leave_segment() {
  if (pipeline_) pipeline_->give_up();
  pipeline_.reset();
  outdated_ = false;
  ended_.clear();
  segment_.leave();
}

// If it throws, this rank can take part in no later operation of the epoch either.
void OperationRunner::perform(collective::Engine::Pass& action) {
  if (outdated_) return;
  if (!pipeline_) throw Exception(ErrorCode::error, "this member has not attached the segment");
  collective::PipelineOperation& operation = action.operation;
  if (may_be_lent(operation)) {
    operation.lent = place(operation.inputs.front().data(), operation.output.size());
  }
  pipeline_->start(std::move(operation));
  rpc_->context()->engine().loop().wake();
  crash_point("slice.sent");
}

void OperationRunner::perform(collective::Engine::Publish& action) {
  if (!pipeline_) return;
  pipeline_->publish(action.s, action.chunk, std::move(action.result));
  rpc_->context()->engine().loop().wake();
}

void OperationRunner::perform(collective::Engine::Abandon& action) {
  if (!pipeline_) return;
  pipeline_->abandon(action.s);
  rpc_->context()->engine().loop().wake();
}

// Returns the place where the other members of the host read these bytes. Empty: they are not in
// the lending pool, or a member has not mapped the segment, which this call then passes.
collective::LentPlace OperationRunner::place(const std::byte* data, std::size_t size) const {
  const auto place = rpc_->context()->lending().find(data, size);
  const std::uint32_t ranks = pipeline_->layout().ranks;
  if (!place || ranks == 1) return {};
  bool mapped = true;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    if (rank == segment_.rank()) continue;
    mapped &= rpc_->lends(segment_.instance(rank), segment_.name(rank), place->segment, group_);
  }
  return mapped ? collective::LentPlace{place->segment, place->offset} : collective::LentPlace{};
}

LentBytes OperationRunner::lent_by(std::uint32_t rank, std::uint64_t segment) const {
  const Uid& lender = segment_.instance(rank);
  LentBytes bytes = rpc_->lent_by(lender, segment);
  for (auto ended = ended_.begin(); bytes == nullptr && ended != ended_.end(); ++ended) {
    if (ended->first == lender) bytes = ended->second->lent_bytes(segment);
  }
  return bytes;
}

void OperationRunner::connection_ended(const Uid& instance,
                                       const std::shared_ptr<transport::Connection>& connection) {
  if (segment_.rank_of(instance) && connection->path() == wire::PathKind::shm) {
    ended_.emplace_back(instance, connection);
  }
}

bool OperationRunner::poll() {
  if (!pipeline_ || (pipeline_->idle() && !pipeline_->must_look())) return false;
  const auto keep = shared_from_this();
  bool worked = true;
  const auto go_on = [&]() MOOLINK_LOCKED {
    worked = advance();
    if (worked) take_sums();
    if (worked) take_ended();
  };
  guard(go_on, [this](const Error& error) MOOLINK_LOCKED { events_.disagreed(error); });
  return worked;
}

// As much as possible now, for a limited time. Rings at once the ranks that sleep for its stores.
bool OperationRunner::advance() {
  bool worked = false;
  const Time until = io::now() + kPollTime;
  while (pipeline_->step()) {
    worked = true;
    for (const std::uint32_t rank : pipeline_->take_wakeups()) segment_.ring(rank);
    if (!pipeline_->must_look() && io::now() >= until) break;
  }
  return worked;
}

void OperationRunner::take_sums() {
  for (collective::SharedPipeline::Sum& sum : pipeline_->take_sums()) {
    engine_.summed_here(std::move(sum));
    carry_out();
    if (!pipeline_) return;  // this member has moved to another epoch
  }
}

void OperationRunner::take_ended() {
  if (!pipeline_) return;
  const std::vector<collective::SharedPipeline::Ended> all = pipeline_->take_ended();
  if (all.empty()) return;
  if (pipeline_->given_up()) {
    leave_segment();
    outdated_ = true;
    return;
  }
  for (const collective::SharedPipeline::Ended& ended : all) {
    if (!ended.abandoned) engine_.passed(ended.s);
    carry_out();
    if (!pipeline_) return;  // this member has moved to another epoch
  }
}

bool OperationRunner::prepare_sleep() {
  if (!pipeline_) return true;
  const bool waits = pipeline_->announce_sleep();
  if (pipeline_->may_sleep()) return true;
  if (waits) pipeline_->awake();
  return false;
}

}  // namespace moolink::runtime
