#include "runtime/engine/engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"
#include "runtime/engine/action_pump.h"

namespace moolink::runtime {
namespace engine_test {

// An engine with its reactor.
struct Running {
  Engine engine;
  std::thread reactor{[this] { engine.run_reactor(); }};

  ~Running() {
    {
      const Engine::Lock lock = engine.lock();
      engine.stop_reactor();
    }
    reactor.join();
  }
};

// Its ticks throw, as its flushes do.
struct Failing final : Driven {
  void tick(Time) override {
    ++ticks;
    throw std::bad_alloc();
  }
  Time next_deadline() const override { return {}; }
  void flush() override { throw std::runtime_error("a flush"); }
  int ticks = 0;
};

TEST("a tick that throws is told, keeps no other from its tick and comes out of no wait") {
  struct Sound final : Driven {
    void tick(Time now) override {
      due = kNever;
      ticked = now;
    }
    Time next_deadline() const override { return due; }
    Time due{};
    Time ticked{};
  };
  Engine engine;
  std::vector<std::string> told;
  engine.on_failure([&](const Error& error) { told.push_back(error.message); });
  Failing failing;
  Sound sound;
  Engine::Lock lock = engine.lock();
  const std::array driven{engine.add(failing), engine.add(sound)};
  Waiter waiter;
  engine.loop().at(io::now() + milliseconds(50), [&] { engine.finish(waiter); });
  CHECK(engine.wait(lock, waiter, kNever, {}));
  CHECK(sound.ticked != Time{});
  // It is tried again, and not without a pause.
  CHECK(failing.ticks >= 2 && failing.ticks <= 10);
  CHECK(std::ranges::count(told, "out of memory") == failing.ticks);
  CHECK(std::ranges::count(told, "a flush") > 0);
}

TEST("an action that throws ends what it is for, and the rest are carried out in order") {
  using Actions = std::vector<std::variant<int>>;
  std::vector<Actions> batches{{1, 2, 3}, {4}};
  std::vector<int> done;
  std::vector<std::pair<int, std::string>> ended;
  ActionPump pump;
  std::size_t taken = 0;
  const auto take = [&] { return taken < batches.size() ? batches[taken++] : Actions(); };
  std::function<void()> run;
  run = [&] {
    pump.run(
        take,
        [&](int& action) {
          run();  // an action brings about others: they come after these
          if (action == 2) throw std::bad_alloc();
          done.push_back(action);
        },
        [&](int action, const Error& error) {
          ended.emplace_back(action, error.message);
          throw std::runtime_error("not even that");
        });
  };
  run();
  CHECK(done == std::vector<int>({1, 3, 4}));
  CHECK_EQ(ended.size(), 1U);
  CHECK(ended.at(0) == std::pair(2, std::string("out of memory")));
}

TEST("the reactor runs what is posted while nobody waits") {
  Running running;
  std::atomic<int> done{0};
  for (int i = 0; i < 50; ++i) {
    running.engine.loop().post([&] { ++done; });
    while (done <= i) std::this_thread::yield();
  }
  CHECK_EQ(done.load(), 50);
}

TEST("the reactor polls again after others have, for short and for long") {
  Running running;
  for (const Duration long_enough_to_park : {Duration::zero(), Duration(milliseconds(10))}) {
    for (int round = 0; round < 20; ++round) {
      {
        Waiter waiter;
        Engine::Lock lock = running.engine.lock();
        running.engine.loop().at(io::now() + long_enough_to_park,
                                 [&] { running.engine.finish(waiter); });
        CHECK(running.engine.wait(lock, waiter, kNever, {}));
      }
      std::atomic<bool> done{false};
      running.engine.loop().post([&] { done = true; });
      while (!done) std::this_thread::yield();
    }
  }
}

TEST("waiting threads are woken, whoever of them polls") {
  Running running;
  constexpr int kThreads = 6;
  constexpr int kRounds = 300;
  std::atomic<int> finished{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        Waiter waiter;
        Engine::Lock lock = running.engine.lock();
        running.engine.loop().post([&] { running.engine.finish(waiter); });
        if (running.engine.wait(lock, waiter, io::now() + seconds(30), {})) ++finished;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(finished.load(), kThreads * kRounds);
}

TEST("a thread that polls is woken by the thread that finishes its wait") {
  Running running;
  for (int round = 0; round < 200; ++round) {
    Waiter waiter;
    std::thread finisher([&] {
      const Engine::Lock lock = running.engine.lock();
      running.engine.finish(waiter);
    });
    {
      Engine::Lock lock = running.engine.lock();
      CHECK(running.engine.wait(lock, waiter, kNever, {}));
    }
    finisher.join();
  }
}

TEST("the holder of the lock lets a waiting thread go first") {
  EngineMutex mutex;
  mutex.lock();
  CHECK(!mutex.give_way());
  std::atomic<bool> had_it{false};
  std::thread other([&] {
    const std::lock_guard guard(mutex);
    had_it = true;
  });
  while (!had_it) {
    if (!mutex.give_way()) std::this_thread::yield();
  }
  mutex.unlock();
  other.join();
}

// Not under TSan, which runs a signal's handler at the next call that it knows to block; a lock is
// none of those.
#if !MOOLINK_TEST_THREAD_SANITIZER
// Where the signal's handler holds a thread that the test wants not to run.
int held[2];
std::atomic<bool> is_held{false};

void hold(int) {
  is_held = true;
  char byte = 0;
  while (::read(held[0], &byte, 1) < 0 && errno == EINTR) {
  }
}

TEST("a thread that asked for the lock and does not run keeps nobody waiting") {
  CHECK_EQ(::pipe(held), 0);
  struct sigaction action{};
  struct sigaction before{};
  action.sa_handler = hold;
  CHECK_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  EngineMutex mutex;
  mutex.lock();
  std::thread other([&] { const std::lock_guard guard(mutex); });
  while (!mutex.asked_for()) std::this_thread::yield();
  CHECK_EQ(::pthread_kill(other.native_handle(), SIGUSR1), 0);
  while (!is_held) std::this_thread::yield();
  CHECK(mutex.give_way());
  const char go_on = 0;
  CHECK_EQ(::write(held[1], &go_on, 1), 1);
  mutex.unlock();
  other.join();
  ::sigaction(SIGUSR1, &before, nullptr);
  ::close(held[0]);
  ::close(held[1]);
}
#endif

TEST("a burst leaves together, when there is enough of it, when a thread waits, or by itself") {
  struct Counted : Driven {
    std::atomic<int> flushes{0};
    void tick(Time) override {}
    Time next_deadline() const override { return kNever; }
    void flush() override { ++flushes; }
  } counted;
  Running running;
  Engine::Lock lock = running.engine.lock();
  const Listed driven = running.engine.add(counted);
  const int written = 1000;
  for (int i = 0; i < written; ++i) running.engine.flush_bursts();
  CHECK(counted.flushes > 0 && counted.flushes < written);
  // The last ones are alone: nobody writes or waits any more.
  const int before = counted.flushes;
  running.engine.flush_bursts();
  running.engine.flush_bursts();
  lock.unlock();
  while (counted.flushes == before) std::this_thread::yield();
  lock.lock();
}

TEST("what a machine writes when its time has come leaves in the same turn") {
  struct Pinging : Driven {
    Time next = io::now() + milliseconds(20);
    bool written = false;
    std::atomic<int> left{0};
    void tick(Time now) override {
      written = true;
      next = now + milliseconds(20);
    }
    Time next_deadline() const override { return next; }
    void flush() override {
      if (std::exchange(written, false)) ++left;
    }
  } pinging;
  Running running;
  Engine::Lock lock = running.engine.lock();
  const Listed driven = running.engine.add(pinging);
  lock.unlock();
  std::this_thread::sleep_for(milliseconds(200));  // nothing else happens
  CHECK(pinging.left > 2);
  lock.lock();
}

TEST("a wait ends at its deadline, polling or not") {
  Running running;
  std::vector<std::thread> threads;
  std::atomic<int> expired{0};
  for (int t = 0; t < 3; ++t) {  // one polls, the others block
    threads.emplace_back([&] {
      Waiter waiter;
      Engine::Lock lock = running.engine.lock();
      if (!running.engine.wait(lock, waiter, io::now() + milliseconds(20), {})) ++expired;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(expired.load(), 3);
}

TEST("an interrupt ends a wait by throwing, and the engine goes on") {
  Running running;
  for (int round = 0; round < 3; ++round) {
    bool thrown = false;
    Waiter waiter;
    Engine::Lock lock = running.engine.lock();
    try {
      running.engine.wait(lock, waiter, kNever, [] { throw std::runtime_error("interrupted"); });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown);
    lock.unlock();  // throws if it is not held
  }
  std::atomic<bool> done{false};
  running.engine.loop().post([&] { done = true; });
  while (!done) std::this_thread::yield();
}

TEST("machines are ticked when they are due, also one that is armed from another thread") {
  struct Clock : Driven {
    Time due = kNever;
    std::atomic<int> ticks{0};
    void tick(Time) override {
      due = kNever;
      ++ticks;
    }
    Time next_deadline() const override { return due; }
  } clock;
  Running running;
  Listed<Driven> driven;
  {
    const Engine::Lock lock = running.engine.lock();
    driven = running.engine.add(clock);
  }
  for (int i = 0; i < 5; ++i) {
    {
      const Engine::Lock lock = running.engine.lock();
      clock.due = io::now() + milliseconds(2);
      running.engine.rearm(clock.due);
    }
    while (clock.ticks <= i) std::this_thread::yield();
  }
  const Engine::Lock lock = running.engine.lock();
  driven.reset();
}

}  // namespace engine_test
}  // namespace moolink::runtime
