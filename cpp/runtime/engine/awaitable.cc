#include "runtime/engine/awaitable.h"

#include "base/scoped.h"

namespace moolink::runtime {

bool Awaitable::wait(Time deadline, const Engine::Interrupt& interrupt) {
  if (ready()) return true;
  Engine::Lock lock = context_->lock();
  if (ready()) return true;
  Waiter waiter;
  waiter.what = what_;
  waiter.id = id_;
  const Listed listed(waiters_, waiter);  // the lock is held at an exception, too
  return context_->wait(lock, waiter, deadline, interrupt);
}

void Awaitable::notify(const std::shared_ptr<Completions>& completions, std::uint64_t token) {
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

void Awaitable::forget(const std::shared_ptr<Completions>& completions, std::uint64_t token) {
  if (context_->abandoned()) return;
  const Engine::Lock lock = context_->lock();
  const auto taken_back = std::erase_if(watchers_, [&](const auto& watcher) {
    return watcher.second == token && watcher.first.lock() == completions;
  });
  for (std::size_t i = 0; i < taken_back; ++i) completions->expect_no_more();
}

void Awaitable::set_ready() {
  ready_.store(true, std::memory_order_release);
  for (Waiter* waiter : waiters_) context_->engine().finish(*waiter);
  for (const auto& [watcher, token] : watchers_) {
    if (const std::shared_ptr<Completions> completions = watcher.lock()) completions->add(token);
  }
  watchers_.clear();
}

}  // namespace moolink::runtime
