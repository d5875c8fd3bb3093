#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "base/thread_safety.h"
#include "base/time.h"

namespace moolink::runtime {

// A mutex whose holder can let waiting threads go first. A thread that releases a std::mutex and
// takes it again at once, as the polling thread does, keeps all others out: they wake too late.
class EngineMutex {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    waiting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    passed_.fetch_add(1);
    if (!giving_way_.load()) return;
    {
      const std::lock_guard guard(passed_by_mutex_);
    }  // it sleeps, or has not looked yet
    passed_by_.notify_one();
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }
  bool asked_for() const { return waiting_.load(std::memory_order_relaxed) != 0; }

  // If threads wait for the lock, releases it until one of them has had it; false: no thread waits.
  // For a limited time: a thread that the system does not run must not block the others.
  bool give_way() MOOLINK_LOCKED {
    if (!asked_for()) return false;
    const std::uint32_t seen = passed_.load();
    giving_way_.store(true);
    mutex_.unlock();
    {
      std::unique_lock guard(passed_by_mutex_);
      passed_by_.wait_for(guard, kLongestWay, [&] { return passed_.load() != seen; });
    }
    giving_way_.store(false);
    mutex_.lock();
    return true;
  }

 private:
  static constexpr Duration kLongestWay = milliseconds(1);

  std::mutex mutex_;
  std::atomic<std::uint32_t> waiting_{0};
  std::atomic<std::uint32_t> passed_{0};  // threads that had to wait and got it
  std::atomic<bool> giving_way_{false};   // only the polling thread gives way
  std::mutex passed_by_mutex_;            // of passed_by_
  std::condition_variable passed_by_;
};

}  // namespace moolink::runtime
