#include "base/at_fork.h"

#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/barrier.h"

namespace moolink {
namespace {

class Forks {
 public:
  // Never destroyed: a process may fork while its statics are being destroyed.
  static Forks& of_process() {
    static Forks* const forks = new Forks;
    return *forks;
  }

  std::uint64_t add(AtFork::Rank rank, AtFork& one) {
    const std::lock_guard guard(of(rank).mutex);
    of(rank).all.emplace(++of(rank).last, &one);
    return of(rank).last;
  }
  void remove(AtFork::Rank rank, std::uint64_t joined) {
    const std::lock_guard guard(of(rank).mutex);
    of(rank).all.erase(joined);
  }

 private:
  // Each rank has its own lock: participants of a later rank join and leave while a lock of an
  // earlier one is held.
  struct Participants {
    std::mutex mutex;
    // In the order of joining: their locks are always taken in the same order.
    std::map<std::uint64_t, AtFork*> all;
    std::uint64_t last = 0;
  };

  Forks() {
    pthread_atfork([] { of_process().before(); }, [] { of_process().in_parent(); },
                   [] { of_process().in_child(); });
  }

  Participants& of(AtFork::Rank rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  // The work runs without the participants' lock: others join and leave meanwhile.
  void prepare() {
    std::vector<std::shared_ptr<AtFork>> preparing;
    for (Participants& rank : ranks_) {
      const std::lock_guard lock(rank.mutex);
      for (const auto& [joined, one] : rank.all) {
        if (auto held = one->begin_preparing()) preparing.push_back(std::move(held));
      }
    }
    for (const auto& one : preparing) one->prepare_fork();
  }
  void before() {
    // On failure the participants do the work under their locks.
    guard([this] { prepare(); }, [](const Error&) {});
    for (Participants& rank : ranks_) {
      rank.mutex.lock();
      for (const auto& [joined, one] : rank.all) one->before_fork();
    }
  }
  void in_parent() {
    for (auto rank = ranks_.rbegin(); rank != ranks_.rend(); ++rank) {
      for (const auto& [joined, one] : rank->all) one->after_fork_in_parent();
      rank->mutex.unlock();
    }
  }
  void in_child() {
    for (auto rank = ranks_.rbegin(); rank != ranks_.rend(); ++rank) {
      for (const auto& [joined, one] : rank->all) one->after_fork_in_child();
      rank->mutex.unlock();
    }
  }

  std::array<Participants, static_cast<std::size_t>(AtFork::Rank::kCount)> ranks_;
};

}  // namespace

void AtFork::join_forks(Rank rank) { joined_ = Forks::of_process().add(rank, *this); }
void AtFork::leave_forks(Rank rank) { Forks::of_process().remove(rank, joined_); }

}  // namespace moolink
