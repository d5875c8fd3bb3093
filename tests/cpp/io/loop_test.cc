#include "io/loop.h"

#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/descriptor.h"
#include "check.h"

namespace moolink::io {
namespace {

struct Engine {
  Loop loop;
  std::mutex mutex;

  bool turn(Duration wait) {
    std::unique_lock lock(mutex);
    return loop.turn(lock, now() + wait);
  }
};

struct Pipe {
  Descriptor read;
  Descriptor write;

  Pipe() {
    int ends[2];
    CHECK_EQ(::pipe(ends), 0);
    read = Descriptor(ends[0]);
    write = Descriptor(ends[1]);
  }
  void fill() const { CHECK_EQ(::write(write.get(), "x", 1), 1); }
};

TEST("timers run in order, once, and cancelled ones never") {
  Engine engine;
  std::vector<int> order;
  const Time start = now();
  engine.loop.at(start + milliseconds(3), [&] { order.push_back(3); });
  engine.loop.at(start + milliseconds(1), [&] { order.push_back(1); });
  engine.loop.timer(start + milliseconds(2), [&] { order.push_back(2); }).reset();
  while (now() < start + milliseconds(10)) engine.turn(milliseconds(10));
  CHECK((order == std::vector<int>{1, 3}));
  CHECK(engine.loop.next_timer() == kNever);
}

TEST("one that throws keeps no other from running, and its reason is told") {
  Engine engine;
  Pipe one;
  one.fill();
  std::vector<std::string> failures;
  int runs = 0;
  engine.loop.on_failure([&](const char* reason) { failures.emplace_back(reason); });
  const auto watch = engine.loop.watch(one.read.get(), EPOLLIN | EPOLLET,
                                       [](std::uint32_t) { throw std::runtime_error("watch"); });
  engine.loop.at(now(), [] { throw std::runtime_error("timer"); });
  engine.loop.at(now(), [&] { ++runs; });
  engine.loop.post([] { throw std::runtime_error("work"); });
  engine.loop.post([&] { ++runs; });
  engine.turn(milliseconds(10));
  CHECK((failures == std::vector<std::string>{"watch", "timer", "work"}));
  CHECK_EQ(runs, 2);
}

TEST("a callback may remove a watch whose event is already there") {
  Engine engine;
  Pipe one;
  Pipe two;
  int calls = 0;
  Loop::Watch first;
  Loop::Watch second;
  const auto ready = [&](std::uint32_t) {
    ++calls;
    first.reset();
    second.reset();
  };
  first = engine.loop.watch(one.read.get(), EPOLLIN, ready);
  second = engine.loop.watch(two.read.get(), EPOLLIN, ready);
  one.fill();
  two.fill();
  engine.turn(seconds(5));
  engine.turn(Duration::zero());
  CHECK_EQ(calls, 1);
}

TEST("a watch or timer ends when its owner is destroyed or gets another") {
  Engine engine;
  Pipe one;
  one.fill();
  int ran = 0;
  auto timer = engine.loop.timer(now(), [&] { ran += 1; });
  timer = engine.loop.timer(now(), [&] { ran += 10; });
  {
    auto ended = engine.loop.watch(one.read.get(), EPOLLIN, [&](std::uint32_t) { ran += 100; });
    const auto owner = std::move(ended);
  }
  engine.turn(Duration::zero());
  CHECK_EQ(ran, 10);
}

TEST("a callback that owns its own watch or timer is destroyed with the loop") {
  struct Owner {
    Loop::Watch watch;
    Loop::Timer timer;
  };
  const Pipe one;
  std::weak_ptr<Owner> owner;
  {
    Engine engine;
    const auto made = std::make_shared<Owner>();
    made->watch = engine.loop.watch(one.read.get(), EPOLLIN, [made](std::uint32_t) {});
    made->timer = engine.loop.timer(now() + seconds(60), [made] {});
    owner = made;
  }
  CHECK(owner.expired());
}

TEST("posted work and wake end the wait of another thread") {
  Engine engine;
  std::atomic<int> done{0};
  std::thread poller([&] {
    while (done < 100) engine.turn(seconds(30));
  });
  for (int i = 0; i < 100; ++i) {
    engine.loop.post([&] { ++done; });
    if (i % 3 == 0) std::this_thread::yield();
  }
  poller.join();
  CHECK_EQ(done.load(), 100);
}

TEST("a wake before the turn is not lost") {
  Engine engine;
  engine.loop.wake();
  const Time start = now();
  engine.turn(seconds(30));
  CHECK(now() - start < seconds(29));
}

TEST("a pollable is taken before sleeping and told of both") {
  struct Ring : Pollable {
    int items = 0, taken = 0, slept = 0, woken = 0;
    bool poll() override {
      const bool something = items > 0;
      taken += std::exchange(items, 0);
      return something;
    }
    bool prepare_sleep() override {
      ++slept;
      return items == 0;
    }
    void awake() override { ++woken; }
  } ring;
  Engine engine;
  auto polled = engine.loop.add(ring);
  ring.items = 3;
  engine.turn(seconds(30));  // does not sleep: there is something
  CHECK_EQ(ring.taken, 3);
  CHECK_EQ(ring.slept, 1);
  CHECK_EQ(ring.woken, 1);
  polled.reset();
  ring.items = 1;
  engine.turn(Duration::zero());
  CHECK_EQ(ring.taken, 3);
}

}  // namespace
}  // namespace moolink::io
