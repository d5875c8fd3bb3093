#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/time.h"
#include "io/event.h"

namespace moolink::io {

Time now();

// A source of work that rings no descriptor while its consumer is awake: a ring in shared memory.
class Pollable {
 public:
  virtual ~Pollable() = default;
  // Handles pending work; true if there was any.
  virtual bool poll() = 0;
  // Announces that the consumer is about to sleep, then looks once more; false: do not sleep.
  virtual bool prepare_sleep() = 0;
  virtual void awake() = 0;
};

// Descriptors, timers and posted work of one engine. Everything runs under the engine's lock, which
// is released only while turn() blocks in the kernel; a single thread at a time is in turn().
class Loop {
 public:
  using WatchId = std::uint64_t;
  using TimerKey = std::pair<Time, std::uint64_t>;

  Loop();
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // --- with the engine's lock held
  // events are EPOLLIN, EPOLLOUT, EPOLLET; the callback may remove any watch, its own too.
  WatchId watch(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready);
  void change(WatchId id, std::uint32_t events);
  void unwatch(WatchId id);  // before its descriptor is closed
  TimerKey at(Time when, std::function<void()> due);
  // No effect for a timer that has begun to run, and for TimerKey{}: no key is used twice.
  void cancel(const TimerKey& key) { timers_.erase(key); }
  void add(Pollable& pollable) { pollables_.push_back(&pollable); }
  void remove(Pollable& pollable);

  // Gets the error of a callback, timer, pollable or posted work; the others run all the same.
  // Callers that can fail their own operation do so themselves: this is the last barrier.
  void on_failure(std::function<void(const char* reason)> failed) { failed_ = std::move(failed); }

  // Handles the work of the pollables; true if there was any. Does not block.
  bool poll_pollables();
  // Handles ready descriptors; does not block either.
  bool look_at_descriptors();
  // Waits until an event, `until` or wake(), and runs what is due. Returns false if a signal ended
  // the wait.
  template <class Lock>
  bool turn(Lock& engine, Time until) {
    const int timeout = prepare(until);
    engine.unlock();
    const int count = wait(timeout);
    engine.lock();
    return finish(count);
  }
  // When the wait of the last turn() ended.
  Time awake_since() const { return awake_since_; }
  // wake() was called since then.
  bool is_woken() const { return woken_.load(std::memory_order_relaxed); }
  // The last turn() had no event: wake(), a signal or the time limit ended it.
  bool only_woken() const { return only_woken_; }
  // When the next timer is due.
  Time next_timer() const { return timers_.empty() ? kNever : timers_.begin()->first.first; }

  // --- from any thread, with or without the lock
  void post(std::function<void()> work);
  // Ends the wait of the thread in turn(), or the next one.
  void wake();
  // Ends the wait of the thread in turn(), if it waits.
  void wake_sleeper() {
    if (sleeping_.load()) wake();
  }

  // In a forked child: closes the descriptors and touches nothing else.
  void abandon() noexcept;

 private:
  struct Watch {
    int fd;
    std::uint32_t events;
    std::shared_ptr<std::function<void(std::uint32_t)>> ready;
  };

  int prepare(Time until);
  int wait(int timeout);
  bool finish(int count);
  int timeout_us(Time until);
  bool take_posted();
  bool dispatch(int count);
  bool run_timers();
  template <class Work>
  bool run(Work&& work) noexcept;

  int epoll_fd_ = -1;
  Event woken_up_;
  std::uint64_t last_id_ = 0;
  Time awake_since_{};
  bool only_woken_ = false;
  std::unordered_map<WatchId, Watch> watches_;
  std::map<TimerKey, std::function<void()>> timers_;
  std::vector<Pollable*> pollables_;
  std::vector<epoll_event> ready_;
  std::function<void(const char*)> failed_;
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> woken_{false};
  std::mutex posted_mutex_;
  std::vector<std::function<void()>> posted_;
};

}  // namespace moolink::io
