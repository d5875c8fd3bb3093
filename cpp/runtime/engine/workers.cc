#include "runtime/engine/workers.h"

#include <unistd.h>

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
// Also counts threads that wait inside handlers: a task left in the queue then waits for one of
// these waits to end, and each has its time-out.
constexpr std::size_t kMostThreads = 512;

thread_local Workers* current_workers = nullptr;
thread_local bool polls_as_worker = false;

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
  } else if (first && (idle_ > 0 || threads_ - lent_ < 1)) {
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
  help_at_ = kNever;
  if (queue_.empty()) return;
  help_at_ = now + kHelpAfter;
  call_in_another();
}

void Workers::describe(Time, Describe, std::string& text) const {
  text += "workers: " + std::to_string(threads_) + " of at most " + std::to_string(limit_) + ", " +
          std::to_string(idle_) + " idle, " + std::to_string(lent_) + " wait inside of moolink, " +
          std::to_string(queue_.size()) + " tasks not begun\n";
}

void Workers::call_in_another() {
  if (idle_ > 0) {
    engine_.handed_over();
    work_.notify_one();
  } else if (threads_ - lent_ < limit_ && threads_ < kMostThreads) {
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
    if (!queue_.empty()) {
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
  if (queue_.empty() || stopping_) {
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
  work_.notify_all();
  engine_.loop().wake();
  const std::size_t own = current_workers == this ? 1 : 0;
  while (threads_ > own) {
    if (ended_.wait_until(lock, deadline) == std::cv_status::timeout) return false;
  }
  return true;
}

Workers::Lend::Lend(Workers& workers) : workers_(current_workers == &workers ? &workers : nullptr) {
  if (workers_ == nullptr) return;
  ++workers_->lent_;
  if (!workers_->queue_.empty()) workers_->call_in_another();
}

Workers::Lend::~Lend() {
  if (workers_ != nullptr) --workers_->lent_;
}

}  // namespace moolink::runtime
