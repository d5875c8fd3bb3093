// Forks of a process that has a context: while it stops, and from a task.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <latch>
#include <thread>

#include "check.h"
#include "runtime/engine/context.h"

namespace moolink::runtime {
namespace context_fork_test {

constexpr unsigned kHang = 20;  // seconds

int exit_status(pid_t child) {
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool is_closed(Context& context) {
  try {
    const Engine::Lock lock = context.lock();
  } catch (const Exception& e) {
    return e.error().code == ErrorCode::closed;
  }
  return false;
}

TEST("a child that is forked while a context stops, or after it, finds it closed") {
  for (int i = 0; i < 20; ++i) {
    const auto context = Context::create({});
    std::atomic<bool> stopped{false};
    std::thread stopping([&] {
      context->stop();
      stopped = true;
    });
    bool last = false;
    while (!last) {
      last = stopped;
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(kHang);
        ::_exit(is_closed(*context) ? 0 : 1);
      }
      CHECK_EQ(exit_status(child), 0);
    }
    stopping.join();
  }
}

TEST("a child that comes back from its task ends, and runs no other") {
  ContextOptions options;
  options.workers = 1;
  const auto context = Context::create(std::move(options));
  std::latch submitted(1);
  std::latch done(2);
  const pid_t parent = ::getpid();
  pid_t child = 0;
  std::atomic<int> others{0};
  {
    const Engine::Lock lock = context->lock();
    context->workers().submit([&] {
      submitted.wait();
      child = ::fork();
      if (child == 0) {
        ::alarm(kHang);
      } else {
        done.count_down();
      }
    });
    context->workers().submit([&] {
      if (::getpid() != parent) ::_exit(1);
      ++others;
      done.count_down();
    });
  }
  submitted.count_down();
  done.wait();
  CHECK_EQ(exit_status(child), 0);
  CHECK_EQ(others, 1);
  context->stop();
}

}  // namespace context_fork_test
}  // namespace moolink::runtime
