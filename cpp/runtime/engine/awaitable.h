#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/scoped.h"
#include "base/thread_safety.h"
#include "base/time.h"
#include "rpc/actions.h"
#include "runtime/engine/completions.h"
#include "runtime/engine/context.h"

namespace moolink::runtime {

// An outcome that threads and event loops wait for.
class Awaitable {
 public:
  explicit Awaitable(std::shared_ptr<Context> context) : context_(std::move(context)) {}
  Awaitable(const Awaitable&) = delete;
  Awaitable& operator=(const Awaitable&) = delete;

  // True in a forked child: this belongs to the parent.
  bool of_parent() const { return context_->abandoned(); }
  Context& context() { return *context_; }
  bool ready() const { return ready_.load(std::memory_order_acquire); }
  // Waits until ready(), polling the loop if no other thread does; false if the deadline passed.
  // Throws the exceptions of `interrupt`.
  bool wait(Time deadline, const Engine::Interrupt& interrupt) MOOLINK_UNLOCKED {
    if (ready()) return true;
    Engine::Lock lock = context_->lock();
    if (ready()) return true;
    Waiter waiter;
    waiter.what = what_;
    waiter.id = id_;
    const Listed listed(waiters_, waiter);  // the lock is held at an exception, too
    return context_->wait(lock, waiter, deadline, interrupt);
  }
  // Passes the token to `completions` when this is ready, or at once if it is.
  void notify(const std::shared_ptr<Completions>& completions, std::uint64_t token)
      MOOLINK_UNLOCKED {
    const Engine::Lock lock = context_->lock();
    completions->expect();
    if (ready()) {
      completions->add(token);
    } else {
      try {
        watchers_.emplace_back(completions, token);
      } catch (...) {
        completions->expect_no_more();
        throw;
      }
      context_->engine().flush();  // a thread waits
    }
  }
  // Takes the token back: the event loop does not wait any more.
  void forget(const std::shared_ptr<Completions>& completions, std::uint64_t token)
      MOOLINK_UNLOCKED {
    if (context_->abandoned()) return;
    const Engine::Lock lock = context_->lock();
    const auto taken_back = std::erase_if(watchers_, [&](const auto& watcher) {
      return watcher.second == token && watcher.first.lock() == completions;
    });
    for (std::size_t i = 0; i < taken_back; ++i) completions->expect_no_more();
  }

  // The waits at the time-out, for people; null: it did not time out, or they are unknown.
  const std::shared_ptr<const std::string>& detail() const { return detail_; }
  // The present waits, for people.
  std::string who_waits() MOOLINK_UNLOCKED { return context_->who_waits(); }

  // The first outcome is final.
  virtual void complete(rpc::Reply outcome) MOOLINK_LOCKED = 0;
  // How to cancel the operation; it must complete this.
  void on_cancel(std::function<void()> cancel) MOOLINK_LOCKED { cancel_ = std::move(cancel); }
  // Before it is ready.
  void set_detail(std::shared_ptr<const std::string> detail) MOOLINK_LOCKED {
    detail_ = std::move(detail);
  }
  // Its subject, for people: "call" 17.
  void set_subject(const char* what, std::uint64_t id) MOOLINK_LOCKED {
    what_ = what;
    id_ = id;
  }

 protected:
  ~Awaitable() = default;

  // Wakes all waiters.
  void set_ready() MOOLINK_LOCKED {
    ready_.store(true, std::memory_order_release);
    for (Waiter* waiter : waiters_) context_->engine().finish(*waiter);
    for (const auto& [watcher, token] : watchers_) {
      if (const std::shared_ptr<Completions> completions = watcher.lock()) completions->add(token);
    }
    watchers_.clear();
  }
  void set_unready() MOOLINK_LOCKED { ready_.store(false, std::memory_order_release); }

  std::function<void()> cancel_ MOOLINK_GUARDED;

 private:
  std::shared_ptr<Context> context_;
  std::atomic<bool> ready_{false};
  std::shared_ptr<const std::string> detail_;
  const char* what_ MOOLINK_GUARDED = "an operation";
  std::uint64_t id_ MOOLINK_GUARDED = 0;
  std::vector<Waiter*> waiters_ MOOLINK_GUARDED;
  // Weak: an abandoned one keeps no descriptor until this is ready.
  std::vector<std::pair<std::weak_ptr<Completions>, std::uint64_t>> watchers_ MOOLINK_GUARDED;
};

}  // namespace moolink::runtime
