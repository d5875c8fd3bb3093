#include "runtime/engine/context.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/format.h"
#include "base/names.h"
#include "io/host_key.h"
#include "io/quiet_thread.h"

namespace moolink::runtime {
namespace {

constexpr Duration kStopWithin = seconds(2);
constexpr std::size_t kMostExplained = 2000;  // characters
constexpr std::size_t kEventsDumped = 100;    // the last ones; an Rpc shows all of its own

std::size_t default_workers() {
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 2, 8);
}

}  // namespace

Context::Context(ContextOptions options)
    : options_{options.workers == 0 ? default_workers() : options.workers,
               std::move(options.interpreter), std::move(options.log),
               options.host_key ? options.host_key : io::host_key()},
      workers_(engine_, *options_.interpreter, options_.workers),
      dump_server_(engine_.loop(), [this]() MOOLINK_LOCKED { return describe(kEventsDumped); }) {}

std::shared_ptr<Context> Context::create(ContextOptions options) {
  std::shared_ptr<Context> context(new Context(std::move(options)));
  context->workers_.set_owner(context);
  const auto told = [&sink = *context](std::string_view reason) MOOLINK_LOCKED {
    sink.log(LogLevel::error, "the network thread went on after an error: " + std::string(reason));
  };
  context->engine_.loop().on_failure(told);
  context->engine_.on_failure([told](const Error& error) MOOLINK_LOCKED { told(error.message); });
  context->workers_.on_failure([&sink = *context](const Error& error)
                                   MOOLINK_LOCKED { sink.log(LogLevel::warning, error.message); });
  {
    const Engine::Lock held = context->engine_.lock();
    if (const Error error = context->dump_server_.open()) {
      context->log(LogLevel::info, error.message);
    }
  }
  context->workers_.start();
  try {
    context->reactor_ =
        io::quiet_thread("moolink", [&engine = context->engine_] { engine.run_reactor(); });
    context->join_forks(Rank::context);
  } catch (...) {
    context->stop();  // the worker's thread holds a reference
    throw;
  }
  return context;
}

// The context takes part in forks until its threads have ended and its descriptors are closed.
Context::~Context() {
  if (!abandoned()) stop();
  leave_forks(Rank::context);
}

Engine::Lock Context::lock() {
  if (abandoned()) {
    throw Exception(ErrorCode::closed,
                    "this process was forked after moolink had started its threads, which do not "
                    "exist here: make a new Rpc in the child, or start processes by spawn");
  }
  return engine_.lock();
}

bool Context::wait(Engine::Lock& lock, Waiter& waiter, Time deadline,
                   const Engine::Interrupt& interrupt) {
  if (waiter.done) return true;
  Workers::Lend lend(workers_);
  const Time since = io::now();
  while (!engine_.wait(lock, waiter, std::min(deadline, reminder_.next(since)), interrupt)) {
    const Time now = io::now();
    if (now >= deadline) break;
    if (now < reminder_.next(since)) continue;  // another thread has just logged its wait
    if (std::string text = explain(waiter, now); !text.empty()) {
      log(LogLevel::warning, "waits for " + in_seconds(now - since) + " for " + std::move(text));
    }
    reminder_.due(since, now);
  }
  lend.end(lock);
  return waiter.done;
}

// The event that the thread waits for, and its state.
std::string Context::explain(const Waiter& waiter, Time now) const {
  if (waiter.explain) return waiter.explain(now);
  const std::string subject =
      waiter.what + (waiter.id == 0 ? std::string() : " " + std::to_string(waiter.id));
  std::istringstream lines(waits(now));
  std::string own;
  std::string others;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("thread ")) continue;
    (line.find(subject + " of") != std::string::npos ? own : others) += "; " + line;
  }
  std::string text = subject + (own.empty() ? others : own);
  if (text.size() > kMostExplained) text.resize(kMostExplained);
  return text;
}

void Context::log(LogLevel level, std::string text) {
  if (!options_.log) return;
  workers_.submit(
      [sink = options_.log, level, line = in_one_line(std::move(text))] { sink(level, line); });
}

std::string Context::describe(std::size_t events) const {
  const Time now = io::now();
  std::string text = "moolink in process " + std::to_string(getpid()) + "\n";
  engine_.describe(now, Describe::everything, text);
  const std::vector<FlightEvent> last = recorder_.last(events);
  text += "the last " + std::to_string(last.size()) + " of " +
          std::to_string(recorder_.recorded()) + " events\n";
  for (const FlightEvent& event : last) text += line_of(event, now) + "\n";
  return text;
}

std::string Context::dump() {
  const Engine::Lock held = lock();
  return describe(FlightRecorder::kEvents);
}

std::string Context::who_waits() {
  const Engine::Lock held = lock();
  return waits(io::now());
}

std::string Context::waits(Time now) const {
  std::string text;
  engine_.describe(now, Describe::waits, text);
  return text;
}

std::shared_ptr<const std::string> Context::who_waited(Time now) {
  constexpr Duration kFresh = milliseconds(500);
  constexpr std::size_t kMost = std::size_t{8} << 10;
  if (who_waited_ == nullptr || now - who_waited_at_ > kFresh) {
    std::string text = waits(now);
    if (text.size() > kMost) {
      text.resize(text.rfind('\n', kMost) + 1);
      text += "... (all of it: moolink dump)\n";
    }
    who_waited_ = std::make_shared<const std::string>(std::move(text));
    who_waited_at_ = now;
  }
  return who_waited_;
}

void Context::stop() {
  if (std::exchange(stopped_, true)) return;
  workers_.stop(io::now() + kStopWithin);
  {
    const Engine::Lock held = engine_.lock();
    dump_server_.close();
    engine_.stop_reactor();
  }
  if (reactor_.joinable()) reactor_.join();
}

void Context::after_fork_in_child() noexcept {
  engine_lock.assume();  // since before_fork()
  Engine::forget_this_thread();
  if (!abandoned_.exchange(true)) {
    engine_.abandon();
    workers_.abandon();
    dump_server_.abandon();
    for (Forkable* forkable : forkables_) forkable->abandon();
    forkables_.clear();  // the child may destroy some, without the lock
    // Kept for ever: destroying objects that the parent's threads hold or wait on would hang or end
    // this process. (An object that a thread of the parent was destroying stays as it is.)
    new std::shared_ptr<Context>(weak_from_this().lock());
  }
  engine_.after_fork();
}

}  // namespace moolink::runtime
