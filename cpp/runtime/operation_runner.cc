#include "runtime/operation_runner.h"

#include <utility>
#include <variant>

#include "base/crash_point.h"
#include "base/scoped.h"
#include "runtime/service_router.h"

namespace moolink::runtime {
namespace {

// Below this the arithmetic is quicker than waking another thread for it.
constexpr std::size_t kInlineBytes = std::size_t{64} << 10;

std::shared_ptr<Allocator> pool_of(const std::shared_ptr<Context>& context) {
  return {context, &context->pool()};
}

}  // namespace

std::shared_ptr<OperationRunner> OperationRunner::create(std::shared_ptr<RpcPeer> rpc,
                                                         std::string group, std::string scope,
                                                         Events events) {
  std::shared_ptr<OperationRunner> runner(
      new OperationRunner(std::move(rpc), std::move(group), std::move(scope), std::move(events)));
  runner->rpc_->router().add(
      rpc::Service::collective, runner->scope_, runner->group_,
      [weak = std::weak_ptr(runner)](const Uid& from, const wire::Payload& payload) {
        const auto self = weak.lock();
        if (!self) return;
        self->engine_.received(from, payload);
        self->carry_out();
      });
  return runner;
}

OperationRunner::OperationRunner(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope,
                                 Events events)
    : rpc_(std::move(rpc)),
      group_(std::move(group)),
      scope_(std::move(scope)),
      events_(std::move(events)),
      engine_({scope_, rpc_->instance(), pool_of(rpc_->context())}) {}

void OperationRunner::close() {
  if (std::exchange(closed_, true)) return;
  rpc_->router().remove(rpc::Service::collective, scope_);
  engine_.drop_operations();
}

void OperationRunner::carry_out() {
  // An event's handler may start the next operation: its actions are taken by the loop below.
  if (carrying_out_) return;
  const Scoped carrying_out(carrying_out_);
  for (auto actions = engine_.take_actions(); !actions.empty() && !closed_;
       actions = engine_.take_actions()) {
    for (collective::Engine::Action& action : actions) {
      if (auto* send = std::get_if<collective::Engine::Send>(&action)) {
        rpc_->router().send(send->instance, send->name, rpc::Service::collective,
                            std::move(send->payload), group_);
        crash_point("slice.sent");
      } else if (auto* task = std::get_if<collective::Engine::Sum>(&action)) {
        sum(std::move(*task));
      } else if (auto* combine = std::get_if<collective::Engine::Combine>(&action)) {
        events_.combine(std::move(*combine));
      } else if (auto* pass = std::get_if<collective::Engine::Pass>(&action)) {
        events_.pass(std::move(*pass));
      } else if (auto* abandon = std::get_if<collective::Engine::Abandon>(&action)) {
        events_.abandon(*abandon);
      } else if (auto* done = std::get_if<collective::Engine::Done>(&action)) {
        events_.done(std::move(*done));
      }
    }
  }
}

void OperationRunner::sum(collective::Engine::Sum sum) {
  if (sum.task.bytes() <= kInlineBytes) {
    collective::run(sum.task);
    engine_.summed(sum.op, sum.run, sum.slice);
    return;
  }
  rpc_->context()->compute().submit([self = shared_from_this(), sum = std::move(sum)] {
    collective::run(sum.task);
    const Engine::Lock lock = self->rpc_->context()->lock();
    if (self->closed_) return;
    self->engine_.summed(sum.op, sum.run, sum.slice);
    self->carry_out();
    self->rpc_->settle();
  });
}

}  // namespace moolink::runtime
