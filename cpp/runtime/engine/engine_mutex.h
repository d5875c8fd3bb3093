#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "base/time.h"

namespace moolink::runtime {

// A mutex whose holder can let those who wait go first. A thread that gives a std::mutex up and
// takes it again at once, as the one that polls does, keeps all others out: they wake too late.
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
      const std::lock_guard guard(somebody_);
    }  // it sleeps, or has not looked yet
    passed_by_.notify_one();
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }
  bool asked_for() const { return waiting_.load(std::memory_order_relaxed) != 0; }

  // With the lock held: if anybody waits for it, gives it up until one of them has had it; false:
  // nobody does. Not for long: one that the system does not run must not keep the others waiting.
  bool give_way() {
    if (!asked_for()) return false;
    const std::uint32_t seen = passed_.load();
    giving_way_.store(true);
    mutex_.unlock();
    {
      std::unique_lock guard(somebody_);
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
  std::atomic<std::uint32_t> passed_{0};  // those who had to wait and have got it
  std::atomic<bool> giving_way_{false};   // only the one that polls gives way
  std::mutex somebody_;                   // of passed_by_
  std::condition_variable passed_by_;
};

}  // namespace moolink::runtime
