#include "runtime/peer/functions.h"

#include <algorithm>
#include <utility>

#include "base/barrier.h"
#include "base/format.h"
#include "base/scoped.h"
#include "runtime/peer/bounded_wait.h"
#include "runtime/peer/describe.h"

namespace moolink::runtime {
namespace {

// The handlers that run on this thread, the innermost first.
class Frame {
 public:
  Frame(const Functions& functions, const void* function)
      : functions_(functions), function_(function) {
    innermost = this;
  }
  ~Frame() { innermost = outer_; }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  static bool innermost_is_of(const Functions& functions) {
    return innermost != nullptr && &innermost->functions_ == &functions;
  }
  static bool any_is_of(const void* function) {
    for (const Frame* frame = innermost; frame != nullptr; frame = frame->outer_) {
      if (frame->function_ == function) return true;
    }
    return false;
  }

 private:
  inline static thread_local const Frame* innermost = nullptr;

  const Functions& functions_;
  const void* const function_;
  const Frame* const outer_ = innermost;
};

}  // namespace

bool Functions::run_here() const { return Frame::innermost_is_of(*this); }

void Functions::define(const std::string& name, CallHandler handler) {
  auto entry = std::make_shared<Function>();
  entry->handler = std::move(handler);
  if (!functions_.emplace(name, std::move(entry)).second) {
    throw Exception(ErrorCode::invalid_argument,
                    "function '" + name + "' is defined already; undefine it first");
  }
}

std::shared_ptr<Functions::Function> Functions::undefine(const std::string& name) {
  auto entry = functions_.extract(name);
  return entry.empty() ? nullptr : std::move(entry.mapped());
}

void Functions::wait_until_drained(Engine::Lock& lock, Function& function,
                                   const Engine::Interrupt& interrupt) {
  if (function.running == 0 || Frame::any_is_of(&function)) return;
  Waiter drained;
  drained.what = "undefine(): handlers that run";
  const Listed listed(function.drained, drained);
  context_->wait(lock, drained, kNever, interrupt);
}

// ---- handlers ----

void Functions::start(const std::shared_ptr<Sender>& peer, rpc::RunHandler& action, Time now) {
  const std::shared_ptr<Function>& function = functions_.at(action.function);  // Node checks it
  auto responder = std::make_shared<Responder>(peer, action.key, std::move(action.function),
                                               std::move(action.group), action.credit,
                                               std::move(action.arguments));
  const auto handling = running_.emplace(action.key, Handling{responder, action.caller, now}).first;
  Incoming incoming{responder, std::move(action.caller), {}, action.deadline};
  try {
    context_->workers().submit([self = std::shared_ptr<Functions>(peer, this), function,
                                incoming = std::move(incoming)]() mutable {
      self->run(self, function, std::move(incoming));
    });
  } catch (...) {
    responder->disown();  // the caller gets the reason
    running_.erase(handling);
    throw;
  }
  ++received_;
  ++not_returned_;
  ++function->running;
}

// Whether the call waits until its caller takes results again: then it runs anew.
bool Functions::hold_back(const std::shared_ptr<Functions>& self,
                          const std::shared_ptr<Function>& function, const Incoming& incoming) {
  Tasks again;  // destroyed without the lock
  again.push_back([self, function, incoming = incoming]() mutable {
    self->run(self, function, std::move(incoming));
  });
  const rpc::CallKey& key = incoming.responder->key();
  const Engine::Lock lock = context_->lock();
  Handling* handling = find(key);
  if (handling == nullptr || handling->unwanted || !held_callers_.contains(key.caller)) {
    return false;
  }
  handling->held = std::move(again);
  return true;
}

// On a worker.
void Functions::run(const std::shared_ptr<Functions>& self,
                    const std::shared_ptr<Function>& function, Incoming incoming) {
  if (holds_any_) {
    bool held = false;
    guard([&] { held = hold_back(self, function, incoming); }, [](const Error&) {});
    if (held) return;
  }
  const std::shared_ptr<Responder> responder = incoming.responder;
  try {
    const Frame frame(*this, function.get());
    const Time now = io::now();
    responder->begin(now, Engine::this_thread());
    if (now >= incoming.deadline) {
      responder->send(
          Error{.code = ErrorCode::timeout,
                .message = "the call of '" + responder->function() +
                           "' waited for its handler until its time was up; it was not run",
                .function = responder->function()});
    } else if (auto arguments = responder->take_arguments(); arguments) {
      incoming.arguments = std::move(*arguments);
      function->handler(std::move(incoming));
    }
  } catch (const std::exception&) {
    const auto fail = [&] {
      responder->send(Error{.code = ErrorCode::remote,
                            .message = current_error().message,
                            .function = responder->function(),
                            .remote_type = "RuntimeError",
                            .ran = Ran::yes});
    };
    guard(fail, [](const Error&) {});  // it replies when it is dropped
  }
  const Engine::Lock lock = context_->lock();
  if (Handling* handling = find(responder->key()); handling != nullptr) {
    handling->returned = true;
    forget_if_over(responder->key(), *handling);
  }
  if (--function->running == 0) {
    for (Waiter* waiter : function->drained) context_->engine().finish(*waiter);
  }
  if (--not_returned_ == idle_at_ && idle_ != nullptr) context_->engine().finish(*idle_);
}

void Functions::forget_if_over(const rpc::CallKey& key, const Handling& handling) {
  if (handling.returned && (handling.replied || handling.unwanted)) running_.erase(key);
}

void Functions::replied(const rpc::CallKey& key, Handling& handling) {
  handling.replied = true;
  forget_if_over(key, handling);
}

void Functions::cancel(const rpc::CallKey& key, Handling& handling) {
  if (const auto responder = handling.responder.lock()) responder->cancel();
  context_->workers().submit(std::move(handling.held));
  handling.unwanted = true;
  forget_if_over(key, handling);
}

void Functions::hold(const Uid& caller, bool holds) {
  if (holds) {
    held_callers_.insert(caller);
  } else {
    held_callers_.erase(caller);
    for (auto at = running_.lower_bound({caller, 0});
         at != running_.end() && at->first.caller == caller; ++at) {
      context_->workers().submit(std::move(at->second.held));
    }
  }
  holds_any_ = !held_callers_.empty();
}

void Functions::wait_until_idle(Engine::Lock& lock, Duration within) {
  idle_at_ = run_here() ? 1 : 0;
  if (not_returned_ <= idle_at_) return;
  wait_within(*context_, lock, idle_, "close(): handlers that run", within, [] {});
}

void Functions::fail_all() {
  for (auto& [key, handling] : std::exchange(running_, {})) {
    if (const auto responder = handling.responder.lock()) responder->cancel();
    // A worker finds that the call has ended, and counts its handler as done.
    context_->workers().submit(std::move(handling.held));
  }
  functions_.clear();
}

void Functions::describe(Time now, std::size_t most, const std::string& indent,
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
  describe_rest(text, indent, lines.size(), most);
}

}  // namespace moolink::runtime
