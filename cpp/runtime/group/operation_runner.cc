#include "runtime/group/operation_runner.h"

#include <utility>

#include "base/barrier.h"
#include "base/crash_point.h"
#include "runtime/peer/service_router.h"

namespace moolink::runtime {
namespace {

// Below this the arithmetic is quicker than waking another thread for it.
constexpr std::size_t kInlineBytes = std::size_t{64} << 10;

std::shared_ptr<Allocator> pool_of(const std::shared_ptr<Context>& context) {
  return {context, &context->pool()};
}

}  // namespace

OperationRunner::OperationRunner(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope,
                                 Segment segment, Events events)
    : rpc_(std::move(rpc)),
      group_(std::move(group)),
      scope_(std::move(scope)),
      events_(std::move(events)),
      engine_({scope_, rpc_->instance(), pool_of(rpc_->context())}) {
  // An event of the engine, of which this carries out the actions.
  const auto event = [this](auto what) {
    return [this, what](auto&&... arguments) {
      (engine_.*what)(std::forward<decltype(arguments)>(arguments)...);
      carry_out();
    };
  };
  routed_ = rpc_->router().route(rpc::Service::collective, scope_, group_,
                                 event(&collective::Engine::received));
  shared_ = std::make_shared<SharedCollectives>(
      rpc_, group_, segment.scope, segment.what, segment.service,
      SharedCollectives::Events{[this](std::uint64_t epoch) { events_.shares(epoch); },
                                event(&collective::Engine::passed),
                                event(&collective::Engine::summed_here),
                                [this](const Error& error) { events_.disagreed(error); }});
}

OperationRunner::~OperationRunner() {
  if (!rpc_->context()->abandoned()) close();
}

void OperationRunner::close() {
  if (!std::exchange(routed_, nullptr)) return;
  engine_.drop_operations();
  shared_->close();
}

void OperationRunner::enter(Time now, const collective::Engine::Members& members,
                            const Error& reason) {
  shared_->leave();  // so that the operations that fail below do not use it
  engine_.set_members(members, reason);
  carry_out();
  shared_->enter(now, members);
}

MutableBuffer OperationRunner::input(std::size_t bytes) {
  Context& context = *rpc_->context();
  if (shared_->ranks() == 0) return context.pool().allocate(bytes);
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
  if (!engine_.in_shared_memory(op)) return names;
  for (std::string& name : shared_->waiting_for()) names.push_back(std::move(name));
  return names;
}

void OperationRunner::carry_out() {
  if (const Error failure = engine_.take_failure()) events_.broken(failure);
  const auto take = [this] {
    return routed_ ? engine_.take_actions() : std::vector<collective::Engine::Action>();
  };
  pump_.run(
      take, [this](auto& action) { perform(action); },
      [this](const auto& action, const Error& error) { end(action, error); });
}

void OperationRunner::perform(collective::Engine::Send& action) {
  rpc_->send_service_to(action.instance, action.name, rpc::Service::collective,
                        std::move(action.payload), group_);
  crash_point("slice.sent");
}

void OperationRunner::perform(collective::Engine::Pass& action) {
  shared_->start(std::move(action.operation));
  crash_point("slice.sent");
}

void OperationRunner::perform(collective::Engine::Sum& action) {
  if (action.work.bytes() > kInlineBytes) {
    const auto submit = [&] { submit_sum(action); };
    if (guard(submit, [this](const Error& error) { no_thread(error); })) return;
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
    guard(go_on, [&](const Error& why) { self->end(sum, why); });
    self->carry_out();
    self->rpc_->settle();
  });
}

void OperationRunner::end(const collective::Engine::Sum& action, const Error& error) {
  // An operation whose result is being put in its place cannot be cancelled any more.
  if (action.id == collective::kResult) return events_.broken(error);
  engine_.cancel(action.op, error);
}

}  // namespace moolink::runtime
