#include "io/quiet_thread.h"

#include <csignal>
#include <utility>

#include "base/barrier.h"

namespace moolink::io {

std::thread quiet_thread(std::function<void()> body) {
  struct Blocked {
    sigset_t before;
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      // A fault of the thread itself: blocked, it would end the process without its handler.
      for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) {
        sigdelset(&all, fault);
      }
      pthread_sigmask(SIG_BLOCK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } const blocked;
  return std::thread([body = std::move(body)] {
    prepare_for_exceptions();
    body();
  });
}

}  // namespace moolink::io
