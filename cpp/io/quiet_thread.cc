#include "io/quiet_thread.h"

#include <pthread.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <memory>
#include <utility>

#include "base/barrier.h"

namespace moolink::io {
namespace {

// A thread's first use of thread-local data allocates it, and ends the process if there is no
// memory for it. So a thread starts with some reserved, and uses its data at once.
using Room = std::array<std::byte, std::size_t{64} << 10>;
thread_local volatile bool thread_has_data = false;

}  // namespace

std::thread quiet_thread(const char* name, std::function<void()> body) {
  struct Blocked {
    sigset_t before;
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      // A fault of the thread itself: if blocked, it would end the process without its handler.
      for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) {
        sigdelset(&all, fault);
      }
      pthread_sigmask(SIG_BLOCK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } const blocked;
  return std::thread([name, body = std::move(body), room = std::make_unique<Room>()]() mutable {
    room.reset();
    pthread_setname_np(pthread_self(), name);
    prepare_for_exceptions();
    thread_has_data = true;
    body();
  });
}

}  // namespace moolink::io
