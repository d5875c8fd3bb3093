#include "io/task_thread.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"

namespace moolink::io {
namespace task_thread_test {

TEST("tasks run in the order of their submission, all before the end") {
  std::vector<int> order;
  {
    TaskThread thread("test");
    for (int i = 0; i < 100; ++i) thread.submit([&order, i] { order.push_back(i); });
  }
  CHECK_EQ(order.size(), 100u);
  for (int i = 0; i < static_cast<int>(order.size()); ++i) {
    CHECK_EQ(order[static_cast<std::size_t>(i)], i);
  }
}

TEST("tasks that have not begun can be dropped") {
  std::latch begun(1);
  std::latch dropped(1);
  bool ran = false;
  {
    TaskThread thread("test");
    thread.submit([&] {
      begun.count_down();
      dropped.wait();
    });
    thread.submit([&] { ran = true; });
    begun.wait();
    thread.drop_tasks();
    dropped.count_down();
  }
  CHECK(!ran);
}

TEST("a task that does not end can be left; those after it are dropped") {
  struct Shared {
    std::latch begun{1}, destroyed{1}, ended{1};
    std::atomic<bool> ran{false};
  };
  const auto shared = std::make_shared<Shared>();
  {
    TaskThread thread("test", TaskThread::AtEnd::leave);
    thread.submit([shared] {
      shared->begun.count_down();
      shared->destroyed.wait();
      shared->ended.count_down();
    });
    thread.submit([shared] { shared->ran = true; });
    shared->begun.wait();
  }  // with AtEnd::wait it would wait for ever for the first task
  shared->destroyed.count_down();
  shared->ended.wait();
  CHECK(!shared->ran);
}

// The child would be killed by the alarm if it had inherited the lock of a thread that is not
// there.
TEST("a fork finds no thread in the middle of handing over a task") {
  std::atomic<bool> over{false};
  std::atomic<int> waiting{0};
  TaskThread thread("test");  // its last tasks run at its end
  std::thread other([&] {
    while (!over) {
      if (waiting > 100) continue;
      ++waiting;
      thread.submit([&] { --waiting; });
    }
  });
  for (int i = 0; i < 300; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      thread.abandon();
      thread.drop_tasks();
      ::_exit(0);
    }
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    if (status != 0) break;
  }
  over = true;
  other.join();
}

TEST("the last task may destroy the thread's owner") {
  std::latch done(1);
  auto thread = std::make_shared<TaskThread>("test");
  TaskThread& of = *thread;
  std::latch handed_over(1);
  of.submit([&done, &handed_over, thread]() mutable {
    handed_over.wait();
    thread.reset();
    done.count_down();
  });
  thread.reset();
  handed_over.count_down();
  done.wait();
}

}  // namespace task_thread_test
}  // namespace moolink::io
