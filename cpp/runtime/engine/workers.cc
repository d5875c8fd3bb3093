#include "runtime/engine/workers.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/barrier.h"
#include "io/quiet_thread.h"

namespace moolink::runtime {
namespace {

constexpr Duration kTryAgainAfter = milliseconds(100);
constexpr Duration kHelpAfter = milliseconds(1);
// A worker whose wait has ended goes on after this, even if no other worker makes room: all may be
// blocked by a lock that its handler holds.
constexpr Duration kResumeAfter = milliseconds(5);
constexpr Duration kTrimEvery = seconds(10);
constexpr Duration kSayAgainAfter = seconds(10);
// Each wait holds a thread, whose stack and guard page are two of the 65,530 mappings that Linux
// gives a process by default.
constexpr std::size_t kMostWaits = 10'000;

thread_local Workers* current_workers = nullptr;
thread_local bool polls_as_worker = false;
thread_local bool is_lent = false;

}  // namespace

Workers::Workers(Engine& engine, Interpreter& interpreter, std::size_t limit)
    : engine_(engine), interpreter_(interpreter), limit_(limit) {
  pthread_sigmask(SIG_SETMASK, nullptr, &signals_);
}

bool Workers::on_worker_thread() { return current_workers != nullptr; }

bool Workers::in_forked_child() { return current_workers != nullptr && current_workers->forked_; }

void Workers::submit(Task task) {
  Tasks one;
  one.push_back(std::move(task));
  submit(std::move(one));
}

void Workers::submit(Tasks&& tasks) noexcept {
  if (stopping_ || tasks.empty()) return;
  const bool first = queue_.empty();
  queue_.splice(queue_.end(), tasks);
  if (current_workers == this && polls_as_worker)
    return;  // this thread takes it when its turn of the loop ends
  if (first && polling_) {
    engine_.loop().wake();
  } else if (first && idle_ > 0 && running() < limit_) {
    call_in_another();
  } else if (help_at_ == kNever) {
    help_after(kHelpAfter);
  }
}

void Workers::help_after(Duration duration) {
  help_at_ = io::now() + duration;
  engine_.rearm(help_at_);
}

void Workers::tick(Time now) {
  if (now >= trim_at_) trim(now);
  if (now >= resume_at_) resume_one();
  if (now < help_at_) return;
  help_at_ = kNever;
  if (queue_.empty()) return;
  help_at_ = now + kHelpAfter;
  call_in_another();
}

// Ends the threads that have been idle since the last call, for example after a burst of waits.
void Workers::trim(Time now) {
  const std::size_t needed = lent_ + limit_;
  surplus_ = threads_ > needed ? std::min(idle_low_, threads_ - needed) : 0;
  for (std::size_t i = 0; i < surplus_; ++i) work_.notify_one();
  idle_low_ = idle_;
  trim_at_ = threads_ > limit_ ? now + kTrimEvery : kNever;
}

void Workers::describe(Time, Describe, std::string& text) const {
  text += "workers: " + std::to_string(threads_) + " threads: " + std::to_string(running()) +
          " run handlers or callbacks (limit " + std::to_string(limit_) + "), " +
          std::to_string(lent_) + " wait inside moolink, " +
          std::to_string(threads_ - lent_ - running()) + " idle; " + std::to_string(queue_.size()) +
          " tasks not begun\n";
}

void Workers::call_in_another() {
  if (running() >= limit_) return;
  if (idle_ > 0) {
    engine_.handed_over();
    work_.notify_one();
  } else {
    engine_.handed_over();
    guard([this]() MOOLINK_LOCKED { start_thread(); },
          [this](const Error& error) MOOLINK_LOCKED { no_thread(error); });
  }
}

void Workers::start() {
  const Engine::Lock lock = engine_.lock();
  start_thread();
}

void Workers::start_thread() {
  io::quiet_thread("moolink worker", [this, owner = owner_.lock()] { run(); }).detach();
  ++threads_;
  lacks_threads_ = false;
  if (threads_ <= limit_ || trim_at_ != kNever) return;
  trim_at_ = io::now() + kTrimEvery;
  engine_.rearm(trim_at_);
}

// The next free worker takes the task.
void Workers::no_thread(const Error& error) {
  help_after(kTryAgainAfter);
  if (std::exchange(lacks_threads_, true) || !failed_) return;
  failed_(make_error(ErrorCode::error, "no thread to run handlers beside the " +
                                           std::to_string(threads_) +
                                           " there are: " + error.message));
}

void Workers::run() {
  current_workers = this;
  // Programs that a handler starts inherit its mask: with all signals blocked none could end them.
  pthread_sigmask(SIG_SETMASK, &signals_, nullptr);
  bool served = false;  // has just run something, so more is likely to come: worth polling
  Engine::Lock lock = engine_.lock();
  while (!stopping_) {
    if (!queue_.empty() && running() <= limit_) {
      lock.unlock();
      run_queued();
      lock.lock();
      served = true;
    } else if (served && engine_.role_free()) {
      polls_as_worker = polling_ = true;
      engine_.poll_while_idle(lock,
                              [this]() MOOLINK_LOCKED { return stopping_ || !queue_.empty(); });
      polls_as_worker = polling_ = false;
      served = false;
    } else {
      ++idle_;
      work_.wait(lock);
      --idle_;
      idle_low_ = std::min(idle_low_, idle_);
      // Waits that began since trim() can need this thread, perhaps as the last one that serves.
      if (surplus_ > 0 && queue_.empty() && threads_ > lent_ + limit_) {
        --surplus_;
        break;
      }
    }
  }
  lock.unlock();
  interpreter_.thread_ends();
  lock.lock();
  --threads_;
  ended_.notify_all();
}

void Workers::run_queued() {
  interpreter_.enter();
  while (true) {
    const Tasks task = take();
    if (task.empty()) break;
    // Tasks handle their own errors: an error here is a bug of the library, or a lack of memory
    // even for an error.
    guard(task.front(), [this](const Error& error) {
      if (!forked_) interpreter_.failed(error.message.c_str());
    });
    // A child that returns from the task: the remaining work is the parent's.
    if (forked_) _exit(EXIT_SUCCESS);
  }
  interpreter_.leave();
}

Tasks Workers::take() {
  const Engine::Lock lock = engine_.lock();
  Tasks task;
  resume_one();
  if (queue_.empty() || stopping_ || running() > limit_) {
    engine_.flush();  // the replies of the tasks that ran
    return task;
  }
  task.splice(task.end(), queue_, queue_.begin());
  if (!queue_.empty() && help_at_ == kNever) help_after(kHelpAfter);
  return task;
}

bool Workers::stop(Time deadline) {
  Tasks dropped;  // destroyed without the lock
  Engine::Lock lock = engine_.lock();
  stopping_ = true;
  dropped.swap(queue_);
  while (!resuming_.empty()) resume_one();
  work_.notify_all();
  engine_.loop().wake();
  const std::size_t own = current_workers == this ? 1 : 0;
  while (threads_ > own) {
    if (ended_.wait_until(lock, deadline) == std::cv_status::timeout) return false;
  }
  return true;
}

// One worker always remains that does not wait. Otherwise tasks that would end the others' waits
// might stay in the queue.
void Workers::begin_wait() {
  if (lent_ >= kMostWaits) refuse_wait("which is the most at once");
  const bool is_last = threads_ - lent_ <= 1 && !stopping_;
  std::string lack;
  if (is_last && !guard([this]() MOOLINK_LOCKED { start_thread(); },
                        [&](const Error& error) { lack = error.message; })) {
    refuse_wait("and the system gives no thread for further ones: " + lack);
  }
  ++lent_;
  if (!resume_one() && !is_last && !queue_.empty()) call_in_another();
}

// The number of workers that go on after a wait is limited, too: hundreds of threads that compete
// for the GIL would leave no time for anything else.
void Workers::end_wait(Engine::Lock& lock) {
  if (running() < limit_ || stopping_) {
    --lent_;
    return;
  }
  Resuming self;
  const auto join = [&]() MOOLINK_LOCKED {
    resuming_.push_back(&self);
    if (resuming_.size() > 1) return;
    resume_at_ = io::now() + kResumeAfter;
    engine_.rearm(resume_at_);
  };
  if (!guard(join, [](const Error&) {})) {  // without memory there is no limit
    --lent_;
    return;
  }
  self.changed.wait(lock, [&self] { return self.goes_on; });
}

// Lets the first worker whose wait has ended go on.
bool Workers::resume_one() {
  if (resuming_.empty()) return false;
  Resuming& first = *resuming_.front();
  resuming_.pop_front();
  resume_at_ = resuming_.empty() ? kNever : io::now() + kResumeAfter;
  --lent_;
  first.goes_on = true;
  first.changed.notify_one();
  return true;
}

void Workers::refuse_wait(const std::string& why) {
  Error error = make_error(
      ErrorCode::error,
      "a handler or callback cannot wait inside moolink: " + std::to_string(lent_) +
          " of this process do so already, " + why +
          "; let fewer of them wait at once (async def handlers hold no thread), or raise the "
          "process's limits (ulimit -u, pids.max)");
  if (const Time now = io::now(); failed_ && now >= say_again_at_) {
    say_again_at_ = now + kSayAgainAfter;
    failed_(error);
  }
  throw Exception(std::move(error));
}

Workers::Lend::Lend(Workers& workers) {
  if (current_workers != &workers || is_lent) return;
  workers.begin_wait();
  workers_ = &workers;
  is_lent = true;
}

Workers::Lend::~Lend() {
  if (workers_ == nullptr) return;
  --workers_->lent_;
  is_lent = false;
}

void Workers::Lend::end(Engine::Lock& lock) {
  if (workers_ == nullptr) return;
  std::exchange(workers_, nullptr)->end_wait(lock);  // does not throw
  is_lent = false;
}

}  // namespace moolink::runtime
