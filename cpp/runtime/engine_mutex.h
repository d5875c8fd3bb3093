#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

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
    if (giving_way_.load()) passed_.notify_all();
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  // With the lock held: one of those who wait for it has it before this returns; false: none does.
  bool give_way() {
    if (waiting_.load(std::memory_order_relaxed) == 0) return false;
    const std::uint32_t seen = passed_.load();
    giving_way_.store(true);
    mutex_.unlock();
    passed_.wait(seen);
    giving_way_.store(false);
    mutex_.lock();
    return true;
  }

 private:
  std::mutex mutex_;
  std::atomic<std::uint32_t> waiting_{0};
  std::atomic<std::uint32_t> passed_{0};  // those who had to wait and have got it
  std::atomic<bool> giving_way_{false};   // only the one that polls gives way
};

}  // namespace moolink::runtime
