// A user's requests to a group: one operation each, among the members of an epoch.

#include <algorithm>
#include <utility>

#include "base/barrier.h"
#include "io/loop.h"
#include "runtime/group/group_peer.h"

namespace moolink::runtime {
namespace {

// For the answer of the member that knows why an operation is late.
constexpr Duration kAnswerWhy = milliseconds(500);
// Of the operations that others have begun, in an error.
constexpr std::size_t kOperationsNamed = 8;

}  // namespace

// A retried operation uses the newest members, any other the members that the user has seen.
void GroupPeer::enter_newest(const std::string& operation, bool retry) {
  if (next_) enter(next_);
  if (entered_->empty()) {
    throw Exception(
        Error{.code = ErrorCode::closed,
              .message = "operation '" + operation + "' of group '" + name_ +
                         "': this peer is in no view of it yet; update() shows when it is",
              .function = name_});
  }
  if (retry || seen_->epoch == entered_->epoch) return;
  if (seen_->empty()) {
    throw Exception(ErrorCode::closed, "operation '" + operation + "' of group '" + name_ +
                                           "': update() has shown no members yet; call it first");
  }
  Error error = group::group_changed(name_, "operation '" + operation + "'", *seen_, *entered_);
  error.message += " update() shows its members.";
  throw Exception(std::move(error));
}

std::shared_ptr<Future> GroupPeer::collective(const std::string& operation, collective::OpSpec spec,
                                              Buffer input, MutableBuffer output, bool lent,
                                              bool retry, std::uint32_t epoch) {
  const Engine::Lock lock = lock_open();
  enter_newest(operation, retry);
  if (epoch != 0 && !retry && epoch != static_cast<std::uint32_t>(seen_->epoch)) {
    throw Exception(
        Error{.code = ErrorCode::group_changed,
              .message = "operation '" + operation + "' of group '" + name_ +
                         "' is of membership " + std::to_string(epoch) +
                         ", in which its token was made; update() has shown membership " +
                         std::to_string(seen_->epoch) + " since: make a new token",
              .function = name_});
  }
  const collective::OpId op = runner_->engine().start(
      operation, std::move(spec), {std::move(input)}, {retry, {}, std::move(output), lent});
  return begin(op, operation, {});
}

std::string GroupPeer::name_for_calls(const std::string& member) {
  const group::MemberInfo* info = view().find(member);
  const Engine::Lock lock = rpc_->context()->lock();
  const bool alone =
      info != nullptr && rpc_->node().is_certain_alone(info->instance, {member, name_});
  return alone ? member : join_names({name_, member});
}

bool GroupPeer::on_one_host() {
  const Engine::Lock lock = lock_open();
  return runner_->engine().members().one_host;
}

std::shared_ptr<Future> GroupPeer::all_reduce_value(const std::string& operation,
                                                    wire::Payload value, Combine combine,
                                                    bool retry) {
  const Engine::Lock lock = lock_open();
  enter_newest(operation, retry);
  const collective::OpId op =
      runner_->engine().start_value(operation, std::move(value), {retry, {}, {}, false});
  return begin(op, operation, std::move(combine));
}

std::shared_ptr<Future> GroupPeer::begin(collective::OpId op, const std::string& operation,
                                         Combine combine) {
  const Time now = io::now();
  std::shared_ptr<Future> future;
  try {
    future = std::make_shared<Future>(rpc_->context());
    future->on_cancel([this, op]() MOOLINK_LOCKED {
      runner_->engine().cancel(op, {.code = ErrorCode::cancelled,
                                    .message = "the operation was cancelled",
                                    .function = name_,
                                    .ran = Ran::maybe});
      settle(io::now());
    });
    running_[op] = {operation, future, now + operation_timeout_, std::move(combine)};
  } catch (...) {
    runner_->engine().cancel(op, current_error());  // its end could not be reported
    settle(now);
    throw;
  }
  settle(now);
  return future;
}

void GroupPeer::done(collective::Engine::Done ended) {
  const auto found = running_.find(ended.op);
  if (found == running_.end()) return;
  const std::shared_ptr<Future> future = std::move(found->second.future);
  running_.erase(found);
  if (next_ && running_.empty()) {  // in the next turn: the engine is handling its actions
    rpc_->context()->engine().rearm(io::now());
  }
  if (ended.error) {
    future->complete(std::move(ended.error));
  } else if (!ended.value.body.empty()) {
    future->complete(std::move(ended.value));
  } else {
    guard([&]() MOOLINK_LOCKED { future->complete(wire::Payload{{}, {std::move(ended.tensor)}}); },
          [&](const Error& error) MOOLINK_LOCKED { future->complete(error); });
  }
}

void GroupPeer::combine(collective::Engine::Combine asked) {
  const auto found = running_.find(asked.op);
  if (found == running_.end()) return;
  // The group may be closed and gone by the time the user's code has run.
  rpc_->context()->workers().submit(
      [runner = runner_, rpc = rpc_, run = found->second.combine, asked = std::move(asked)] {
        std::variant<wire::Payload, Error> result;
        guard([&] { result = run(asked.payloads); }, [&](const Error& error) { result = error; });
        const Engine::Lock lock = rpc->context()->lock();
        runner->engine().combined(asked.op, asked.run, std::move(result));
        runner->carry_out();
        rpc->settle();
      });
}

// A member that waits for rank 0's Go does not know whose start rank 0 lacks: rank 0 gets a moment
// to tell all members.
void GroupPeer::end_late(Time now, collective::OpId op) {
  Running& running = running_.at(op);
  std::string waiting;
  for (const std::string& name : runner_->waiting_for(op)) waiting += " " + name;
  if (!waiting.empty()) waiting += own_lack(now);
  const Error error{.code = ErrorCode::timeout,
                    .message = "operation '" + running.operation + "' of group '" + name_ +
                               "' did not end in time; " + rpc_->node().name() + " waits for:" +
                               (waiting.empty() ? " no member" : waiting) + begun_elsewhere(),
                    .function = name_,
                    .ran = Ran::maybe};
  running.deadline = kNever;
  if (!std::exchange(running.asked_why, true) && runner_->engine().ask_why(op, error)) {
    running.deadline = now + kAnswerWhy;
    return;
  }
  runner_->engine().cancel(op, error);
}

// Members that begin operations one after another, in different orders, wait for one another.
std::string GroupPeer::begun_elsewhere() const {
  std::string text;
  std::size_t named = 0;
  for (const auto& [operation, names] : runner_->engine().begun_elsewhere()) {
    if (++named > kOperationsNamed) {
      text += "; and others";
      break;
    }
    text += "; '" + operation + "' was begun by";
    for (const std::string& name : names) text += " " + name;
    text += " and not by " + rpc_->node().name();
  }
  if (!text.empty()) text += ": members must begin blocking operations in the same order";
  return text;
}

}  // namespace moolink::runtime
