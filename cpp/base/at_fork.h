#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

namespace moolink {

// Takes part in every fork() of this process. No other thread is in the middle of one of its
// operations while the process forks, so that the child finds its locks free and its state whole.
// Programs started by vfork() or posix_spawn() do not concern it.
class AtFork {
 public:
  // The order of locks: a thread that holds one of a later rank takes none of an earlier one, and
  // not two of one rank.
  enum class Rank { context, memory, kCount };

  AtFork(const AtFork&) = delete;
  AtFork& operator=(const AtFork&) = delete;

  // Slow work, before the locks of any participant are taken, while other threads go on.
  // begin_preparing() returns the participant, to keep it alive for the work; null: no work.
  virtual std::shared_ptr<AtFork> begin_preparing() noexcept { return nullptr; }
  virtual void prepare_fork() noexcept {}
  // Takes its locks; none that a thread may hold while it waits for the GIL.
  virtual void before_fork() noexcept {}
  virtual void after_fork_in_parent() noexcept {}
  // On the only thread that exists.
  virtual void after_fork_in_child() noexcept = 0;

 protected:
  AtFork() = default;
  ~AtFork() = default;

  // Call these once it is whole, and before any of it is destroyed; without any of its locks, and
  // for Rank::context without any lock.
  void join_forks(Rank rank);
  void leave_forks(Rank rank);

 private:
  std::uint64_t joined_ = 0;  // its place among those of its rank
};

// Holds a mutex over each fork: one under which a thread takes no other lock.
class HeldOverForks final : public AtFork {
 public:
  explicit HeldOverForks(std::mutex& mutex) : mutex_(mutex) { join_forks(Rank::memory); }
  ~HeldOverForks() { leave_forks(Rank::memory); }

 private:
  void before_fork() noexcept override { mutex_.lock(); }
  void after_fork_in_parent() noexcept override { mutex_.unlock(); }
  void after_fork_in_child() noexcept override { mutex_.unlock(); }

  std::mutex& mutex_;
};

// Tells, without a system call, whether this process is a fork of the one that made the object.
class ForkedSince final : public AtFork {
 public:
  ForkedSince() { join_forks(Rank::memory); }
  ~ForkedSince() { leave_forks(Rank::memory); }

  explicit operator bool() const { return forked_; }

 private:
  void after_fork_in_child() noexcept override { forked_ = true; }

  bool forked_ = false;
};

}  // namespace moolink
