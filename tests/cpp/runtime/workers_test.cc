#include "runtime/engine/workers.h"

#include <atomic>
#include <barrier>
#include <latch>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime/engine/context.h"

namespace moolink::runtime {
namespace workers_test {

std::shared_ptr<Context> context_with(std::size_t workers) {
  ContextOptions options;
  options.workers = workers;
  return Context::create(std::move(options));
}

void submit(Context& context, Task task) {
  const Engine::Lock lock = context.lock();
  context.workers().submit(std::move(task));
}

TEST("tasks of one worker run in the order of submission") {
  const auto context = context_with(1);
  std::vector<int> order;
  std::latch done(1000);
  for (int i = 0; i < 1000; ++i) {
    submit(*context, [&, i] {
      order.push_back(i);
      done.count_down();
    });
  }
  done.wait();
  for (int i = 0; i < 1000; ++i) CHECK_EQ(order[static_cast<std::size_t>(i)], i);
  context->stop();
}

TEST("tasks that block get company, up to the limit") {
  const auto context = context_with(3);
  std::barrier meeting(3);  // none passes before three are in
  std::latch done(6);
  for (int i = 0; i < 6; ++i) {
    submit(*context, [&] {
      meeting.arrive_and_wait();
      done.count_down();
    });
  }
  done.wait();
  const Engine::Lock lock = context->lock();
  CHECK_EQ(context->workers().threads(), 3u);
}

TEST("a worker that waits in moolink lends its slot") {
  const auto context = context_with(1);
  constexpr int kDepth = 20;
  std::vector<Waiter> waiters(kDepth);
  std::latch done(kDepth);
  std::function<void(int)> nested = [&](int depth) {
    if (depth + 1 < kDepth) submit(*context, [&, depth] { nested(depth + 1); });
    Engine::Lock lock = context->lock();
    // The innermost task wakes all; with one slot and no lending none would come so far.
    if (depth + 1 == kDepth) {
      for (Waiter& waiter : waiters) context->engine().finish(waiter);
    }
    CHECK(
        context->wait(lock, waiters[static_cast<std::size_t>(depth)], io::now() + seconds(30), {}));
    lock.unlock();
    done.count_down();
  };
  submit(*context, [&] { nested(0); });
  done.wait();
  context->stop();
}

// Submits tasks that wait until the last one of them runs; returns when all have ended.
void wait_at_once(Context& context, std::size_t count) {
  std::vector<Waiter> waiters(count);
  std::size_t begun = 0;
  std::latch done(static_cast<std::ptrdiff_t>(count));
  for (std::size_t i = 0; i < count; ++i) {
    submit(context, [&, i] {
      Engine::Lock lock = context.lock();
      if (++begun == count) {
        for (Waiter& waiter : waiters) context.engine().finish(waiter);
      }
      CHECK(context.wait(lock, waiters[i], io::now() + seconds(60), {}));
      lock.unlock();
      done.count_down();
    });
  }
  done.wait();
}

TEST("more tasks can wait at once than a process usually has threads") {
  const auto context = context_with(2);
  wait_at_once(*context, 1500);
  context->stop();
}

TEST("threads beyond the limit that stay idle end") {
  const auto context = context_with(2);
  wait_at_once(*context, 50);
  std::size_t threads = 0;
  const Time give_up = io::now() + seconds(60);
  while (io::now() < give_up) {
    const Engine::Lock lock = context->lock();
    threads = context->workers().threads();
    if (threads == 2) break;
    context->workers().tick(io::now() + std::chrono::hours(1));
    std::this_thread::yield();
  }
  CHECK_EQ(threads, 2u);
  wait_at_once(*context, 50);
  context->stop();
}

TEST("a wait that ends goes on although the running handlers are blocked until it does") {
  const auto context = context_with(1);
  Waiter waiter;
  std::latch waits(1);
  std::latch done(1);
  submit(*context, [&] {
    Engine::Lock lock = context->lock();
    waits.count_down();
    CHECK(context->wait(lock, waiter, io::now() + seconds(60), {}));
    lock.unlock();
    done.count_down();
  });
  waits.wait();
  std::latch returned(1);
  submit(*context, [&] {
    {
      const Engine::Lock lock = context->lock();
      context->engine().finish(waiter);
    }
    done.wait();  // as for a lock that the other handler holds
    returned.count_down();
  });
  returned.wait();
  context->stop();
}

TEST("tasks are inside of the interpreter, one thread's end too") {
  struct Counting : Interpreter {
    std::atomic<int> inside{0}, entered{0}, ended{0};
    std::latch failure{1};
    void enter() override {
      ++entered;
      ++inside;
    }
    void leave() override { --inside; }
    void thread_ends() override { ++ended; }
    void failed(const char*) override { failure.count_down(); }
  };
  const auto counting = std::make_shared<Counting>();
  ContextOptions options;
  options.workers = 2;
  options.interpreter = counting;
  const auto context = Context::create(std::move(options));
  std::latch done(10);
  for (int i = 0; i < 10; ++i) {
    submit(*context, [&] {
      CHECK(counting->inside > 0);
      done.count_down();
    });
  }
  submit(*context, [] { throw std::runtime_error("a task that does not answer for its errors"); });
  done.wait();
  counting->failure.wait();
  context->stop();
  CHECK(counting->entered > 0);
  CHECK_EQ(counting->inside.load(), 0);
  CHECK(counting->ended > 0);
}

TEST("stopping does not wait for ever for a task that does not return") {
  auto context = context_with(1);
  std::atomic<bool> go{false};
  std::latch running(1);
  std::latch returned(1);
  submit(*context, [&] {
    running.count_down();
    while (!go) std::this_thread::yield();
    returned.count_down();
  });
  running.wait();
  CHECK(!context->workers().stop(io::now() + milliseconds(20)));
  context.reset();  // its thread keeps it alive
  go = true;
  returned.wait();
}

}  // namespace workers_test
}  // namespace moolink::runtime
