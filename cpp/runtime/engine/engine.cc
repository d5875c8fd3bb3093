#include "runtime/engine/engine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/barrier.h"
#include "base/format.h"

namespace moolink::runtime {
namespace {

constexpr Duration kLongTurn = microseconds(50);  // after that, others get the lock first
constexpr Duration kBurst = microseconds(30);     // between two writes that belong together
constexpr Duration kLeaveWithin = microseconds(200);
constexpr std::size_t kMostPutOff = 16;
constexpr Duration kStandBy = milliseconds(1);  // the reactor is never absent for longer
constexpr Duration kInterruptEvery = milliseconds(50);
constexpr Duration kTickAgain = milliseconds(10);  // after a failed one

thread_local int thread_number = 0;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void wait_on(std::condition_variable_any& condition, Engine::Lock& lock, Time until) {
  if (until == kNever) {
    condition.wait(lock);
  } else {
    condition.wait_until(lock, until);
  }
}

// Takes the lock again also if the function throws.
void call_unlocked(Engine::Lock& lock, const Engine::Interrupt& function) MOOLINK_LOCKED {
  struct Relock {
    Engine::Lock& lock;
    explicit Relock(Engine::Lock& held) : lock(held) { lock.unlock(); }
    ~Relock() { lock.lock(); }
  } relock(lock);
  function();
}

}  // namespace

void Engine::finish(Waiter& waiter) {
  waiter.done = true;
  if (!waiter.blocked) {
    loop_.wake_sleeper();  // it may be the polling one
    return;
  }
  handed_over_ = true;
  waiter.changed.notify_one();
}

void Engine::flush_bursts() {
  const Time current = io::now();
  const bool burst = current - std::exchange(written_at_, current) < kBurst;
  if (!burst || ++put_off_ >= kMostPutOff) {
    flush();
    return;
  }
  leave_at_ = std::min(leave_at_, current + kLeaveWithin);
  rearm(leave_at_);
}

void Engine::flush() {
  put_off_ = 0;
  leave_at_ = kNever;
  for (std::size_t i = 0; i < driven_.size(); ++i) {
    guard([&]() MOOLINK_LOCKED { driven_[i]->flush(); },
          [this](const Error& error) {
            if (failed_) failed_(error);
          });
  }
}

bool Engine::wait(Lock& lock, Waiter& waiter, Time deadline, const Interrupt& interrupt) {
  if (!waiter.done) flush();
  if (waiter.since == Time{}) waiter.since = io::now();  // else it continues a wait
  waiter.thread = this_thread();
  const Listed listed(waiters_, waiter);
  while (!waiter.done) {
    Time current = io::now();
    if (current >= deadline) return false;
    const Time until = interrupt ? std::min(deadline, current + kInterruptEvery) : deadline;
    if (role_free()) {
      const Role role(*this);
      // A signal ends a turn early, so that it is handled at once.
      while (!waiter.done && current < until && turn(lock, until)) current = io::now();
    } else {
      waiter.blocked = true;
      wait_on(waiter.changed, lock, until);
      waiter.blocked = false;
    }
    if (!waiter.done && interrupt) call_unlocked(lock, interrupt);
  }
  return true;
}

void Engine::describe(Time now, Describe how, std::string& text) const {
  for (const Driven* driven : driven_) driven->describe(now, how, text);
  for (const Waiter* waiter : waiters_) {
    text += "thread " + std::to_string(waiter->thread) + " waits for " + waiter->what;
    if (waiter->id != 0) text += " " + std::to_string(waiter->id);
    text += " since " + in_seconds(now - waiter->since) + "\n";
  }
}

int Engine::this_thread() {
  if (thread_number == 0) {
    thread_number = gettid();
    prepare_for_exceptions();
  }
  return thread_number;
}

void Engine::forget_this_thread() { thread_number = 0; }

void Engine::poll_while_idle(Lock& lock, const std::function<bool()>& leave) {
  const Role role(*this);
  handed_over_ = false;
  while (!handed_over_ && !leave()) turn(lock, kNever);
}

Engine::Role::Role(Engine& taken_of) : engine(taken_of) {
  engine.role_taken_ = true;
  ++engine.turns_taken_;
}

Engine::Role::~Role() {
  engine.role_taken_ = false;
  // Another waiting thread polls from now on; if none does within a moment, the reactor does.
  const auto blocked = std::ranges::find_if(
      engine.waiters_, [](const Waiter* waiter) MOOLINK_LOCKED { return waiter->blocked; });
  if (blocked != engine.waiters_.end()) (*blocked)->changed.notify_one();
  if (engine.reactor_parked_) engine.reactor_.notify_one();
}

bool Engine::turn(Lock& lock, Time until) {
  // Gives way once, or this thread might never poll. The awaited event may have happened meanwhile.
  const Time begin = io::now();
  const bool long_turn = begin - loop_.awake_since() > kLongTurn;
  gave_way_ = long_turn && !gave_way_ && mutex_.give_way();
  if (gave_way_) return true;
  polling_until_ = std::min(until, next_deadline());
  const bool found = look_again(lock, begin, long_turn);
  const bool undisturbed = found || loop_.turn(lock, polling_until_);
  polling_until_ = kNever;
  const Time current = io::now();
  const bool ticked = tick(current);
  if (ticked || found || !loop_.only_woken() || current >= leave_at_) flush();
  return undisturbed;
}

// Each behind the barrier. A failed tick is due again at once, and retried after a moment.
bool Engine::tick(Time now) {
  if (now < ticks_at_) return false;
  bool ticked = false;
  // By index: a tick may add or remove driven objects.
  for (std::size_t i = 0; i < driven_.size(); ++i) {
    if (driven_[i]->next_deadline() > now) continue;
    ticked = true;
    guard([&]() MOOLINK_LOCKED { driven_[i]->tick(now); },
          [&](const Error& error) MOOLINK_LOCKED {
            ticks_at_ = now + kTickAgain;
            if (failed_) failed_(error);
          });
  }
  return ticked;
}

// Spins for a moment before sleeping, if that has paid off. Does not keep threads waiting for the
// lock, and lets timers run.
bool Engine::look_again(Lock& lock, Time begin, bool long_turn) {
  if (!spin_policy_.should_spin(begin)) return false;
  if (long_turn) {
    // The lock was released: its holder may have asked for an earlier end of this turn, and that
    // wake-up is consumed.
    loop_.turn(lock, begin);
    return true;
  }
  const Duration alone = spin_policy_.yield_after();
  bool something = false;
  bool offered = false;
  unsigned looks = 0;
  Time current = begin;
  for (; current - begin < SpinPolicy::kSpin && current < polling_until_; current = io::now()) {
    if (mutex_.asked_for() || loop_.is_woken()) return false;
    // A look at descriptors is a system call: one in four.
    something = loop_.poll_pollables() || (looks % 4 == 0 && loop_.look_at_descriptors());
    if (something) break;
    if (looks++ % 4 == 2 && current - begin >= alone) {
      sched_yield();
      offered = true;
    } else {
      pause();
    }
  }
  spin_policy_.spun(something, offered, begin, current);
  return something;
}

Time Engine::next_deadline() const {
  Time first = leave_at_;
  for (const Driven* driven : driven_) {
    first = std::min(first, std::max(ticks_at_, driven->next_deadline()));
  }
  return first;
}

void Engine::run_reactor() {
  Lock lock(mutex_);
  while (!stopping_) {
    stand_by(lock);
    if (!stopping_) poll_while_idle(lock, [this] { return stopping_.load(); });
  }
}

// Lets the others poll for as long as they keep doing so; the role is free when this returns, or
// the reactor stops.
void Engine::stand_by(Lock& lock) {
  while (!stopping_) {
    call_unlocked(lock, [this] { nap_while_others_poll(); });
    if (!role_taken_ || stopping_) return;
    // One thread polls for long, or again: it will notify when it stops.
    reactor_parked_ = true;
    reactor_.wait(lock, [this]() MOOLINK_LOCKED { return stopping_ || !role_taken_; });
    reactor_parked_ = false;
  }
}

// Without the lock: the polling thread would otherwise give way for nothing.
void Engine::nap_while_others_poll() {
  std::unique_lock guard(napping_);
  const auto stopped = [this] { return stopping_.load(); };
  std::uint64_t seen = 0;
  do {
    seen = turns_taken_;
  } while (!nap_ends_.wait_for(guard, kStandBy, stopped) && turns_taken_ != seen);
}

void Engine::stop_reactor() {
  stopping_ = true;
  reactor_.notify_one();
  {
    const std::lock_guard guard(napping_);
  }  // it sleeps, or has not looked yet
  nap_ends_.notify_one();
  loop_.wake();
}

}  // namespace moolink::runtime
