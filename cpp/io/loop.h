#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/scoped.h"
#include "base/thread_safety.h"
#include "base/time.h"
#include "io/event.h"

namespace moolink::io {

Time now();

// A source of work that rings no descriptor while its consumer is awake: a ring in shared memory.
class Pollable {
 public:
  virtual ~Pollable() = default;
  // Handles pending work; true if there was any.
  virtual bool poll() MOOLINK_LOCKED = 0;
  // Announces that the consumer is about to sleep, then looks once more; false: do not sleep.
  virtual bool prepare_sleep() MOOLINK_LOCKED = 0;
  virtual void awake() MOOLINK_LOCKED = 0;
};

// Descriptors, timers and posted work of one engine. Everything runs under the engine's lock, which
// is released only while turn() blocks in the kernel; a single thread at a time is in turn().
class Loop {
 public:
  using WatchId = std::uint64_t;
  using TimerKey = std::pair<Time, std::uint64_t>;

  // Ends a watch or a timer, with the engine's lock held.
  template <class Key>
  struct End {
    Key key{};
    void operator()(Loop* loop) const MOOLINK_LOCKED { loop->end(key); }
  };
  using Watch = std::unique_ptr<Loop, End<WatchId>>;
  using Timer = std::unique_ptr<Loop, End<TimerKey>>;

  Loop();
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // events are EPOLLIN, EPOLLOUT, EPOLLET; the callback may end any watch, its own too. A watch
  // ends before its descriptor is closed. A callback that owns its own watch lives until the loop
  // is destroyed; any other owner of a watch or a timer ends it before that.
  [[nodiscard]] Watch watch(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready)
      MOOLINK_LOCKED;
  void change(const Watch& watch, std::uint32_t events)
      MOOLINK_LOCKED;  // no effect if it has ended
  [[nodiscard]] Timer timer(Time when, std::function<void()> due) MOOLINK_LOCKED {
    return Timer(this, End<TimerKey>{at(when, std::move(due))});
  }
  // A timer without an owner.
  TimerKey at(Time when, std::function<void()> due) MOOLINK_LOCKED;
  [[nodiscard]] Listed<Pollable> add(Pollable& pollable) MOOLINK_LOCKED {
    return {pollables_, pollable};
  }

  // Gets the error of a callback, timer, pollable or posted work; the others run all the same.
  // Callers that can fail their own operation do so themselves: this is the last barrier.
  void on_failure(std::function<void(const char* reason)> failed) { failed_ = std::move(failed); }

  // Handles the work of the pollables; true if there was any. Does not block.
  bool poll_pollables() MOOLINK_LOCKED;
  // Handles ready descriptors; does not block either.
  bool look_at_descriptors() MOOLINK_LOCKED;
  // Waits until an event, `until` or wake(), and runs what is due. Returns false if a signal ended
  // the wait.
  template <class Lock>
  bool turn(Lock& engine, Time until) MOOLINK_LOCKED MOOLINK_UNCHECKED {
    const int timeout = prepare(until);
    engine.unlock();
    const int count = wait(timeout);
    engine.lock();
    return finish(count);
  }
  // When the wait of the last turn() ended.
  Time awake_since() const MOOLINK_LOCKED { return awake_since_; }
  // wake() was called since then.
  bool is_woken() const { return woken_.load(std::memory_order_relaxed); }
  // The last turn() had no event: wake(), a signal or the time limit ended it.
  bool only_woken() const MOOLINK_LOCKED { return only_woken_; }
  // When the next timer is due.
  Time next_timer() const MOOLINK_LOCKED {
    return timers_.empty() ? kNever : timers_.begin()->first.first;
  }

  // --- from any thread, with or without the lock
  void post(std::function<void()> work) { post(prepare(std::move(work))); }
  // For destructors and deleters, which must not fail: prepare() allocates, post() does not.
  using Prepared = std::list<std::function<void()>>;
  static Prepared prepare(std::function<void()> work) {
    Prepared prepared;
    prepared.push_back(std::move(work));
    return prepared;
  }
  void post(Prepared work) noexcept;
  // Ends the wait of the thread in turn(), or the next one.
  void wake();
  // Ends the wait of the thread in turn(), if it waits.
  void wake_sleeper() {
    if (sleeping_.load()) wake();
  }

  // In a forked child: closes the descriptors and touches nothing else.
  void abandon() noexcept;

 private:
  struct Watched {
    int fd;
    std::uint32_t events;
    std::shared_ptr<std::function<void(std::uint32_t)>> ready;
  };

  void end(WatchId id) MOOLINK_LOCKED;
  // No effect for a timer that has begun to run: no key is used twice.
  void end(TimerKey key) MOOLINK_LOCKED { timers_.extract(key); }
  int prepare(Time until) MOOLINK_LOCKED;
  int wait(int timeout);
  bool finish(int count) MOOLINK_LOCKED;
  int timeout_us(Time until) MOOLINK_LOCKED;
  bool take_posted() MOOLINK_LOCKED;
  bool dispatch(int count) MOOLINK_LOCKED;
  bool run_timers() MOOLINK_LOCKED;
  template <class Work>
  bool run(Work&& work) noexcept;

  int epoll_fd_ = -1;
  Event woken_up_;
  std::uint64_t last_id_ MOOLINK_GUARDED = 0;
  Time awake_since_ MOOLINK_GUARDED{};
  bool only_woken_ MOOLINK_GUARDED = false;
  std::unordered_map<WatchId, Watched> watches_ MOOLINK_GUARDED;
  std::map<TimerKey, std::function<void()>> timers_ MOOLINK_GUARDED;
  std::vector<Pollable*> pollables_ MOOLINK_GUARDED;
  std::vector<epoll_event> ready_;
  std::function<void(const char*)> failed_;
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> woken_{false};
  std::mutex posted_mutex_;
  Prepared posted_;
};

}  // namespace moolink::io
