#pragma once

// Releasing the GIL in a process that may end at any time.
//
// CPython (before 3.14) ends a daemon thread that asks for the GIL while the interpreter is being
// finalised, with pthread_exit. Its unwinding would meet nanobind's frames, which end the process
// when that happens, and destructors that touch Python without the GIL. Such threads are parked
// instead, from moolink's exit hook on: all threads but daemons have ended by then.

#include <Python.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

#include "runtime/engine/context.h"
#include "runtime/engine/workers.h"

namespace moolink::bind {

// Set by the exit hook, which then ends the workers in an orderly way.
inline std::atomic<bool> exiting{false};

[[noreturn]] inline void park_forever() {
  while (true) pause();
}

// Whether this thread is not needed any more and must not run until the end of the interpreter.
inline bool to_be_parked() {
  return exiting && gettid() != getpid() && !runtime::Workers::on_worker_thread();
}

// At the start of functions that other threads call in loops; needs the GIL.
inline void park_if_exiting() {
  if (!to_be_parked()) return;
  PyEval_SaveThread();
  park_forever();
}

// Parks the thread if it is unwound by something else than a C++ exception, which is pthread_exit.
// libstdc++ has a type to catch for that; libc++ has none, but both run destructors.
class ParkIfUnwound {
 public:
  ParkIfUnwound() = default;
  ~ParkIfUnwound() {
    if (!returned_ && std::uncaught_exceptions() == exceptions_) park_forever();
  }
  ParkIfUnwound(const ParkIfUnwound&) = delete;
  ParkIfUnwound& operator=(const ParkIfUnwound&) = delete;

  void returned() { returned_ = true; }

 private:
  int exceptions_ = std::uncaught_exceptions();
  bool returned_ = false;
};

// Runs a function that takes the GIL or calls Python, on a thread that may live until the end.
// Never inlined: in a noexcept function, such as a destructor, the unwinder could end the process
// before it runs the destructor above.
template <class Function>
[[gnu::noinline]] auto survive_exit(Function&& function) {
  ParkIfUnwound guard;
  if constexpr (std::is_void_v<std::invoke_result_t<Function>>) {
    std::forward<Function>(function)();
    guard.returned();
  } else {
    auto result = std::forward<Function>(function)();
    guard.returned();
    return result;
  }
}

// Replaces nanobind::gil_scoped_release.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    if (to_be_parked()) park_forever();
    survive_exit([this] { PyEval_RestoreThread(state_); });
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

template <class Function>
auto without_gil(Function&& function) {
  const GilRelease unlocked;
  return std::forward<Function>(function)();
}

// Without the GIL if that is worth its release.
template <class Function>
void unlocked_if(bool is_long, Function&& function) {
  std::optional<GilRelease> unlocked;
  if (is_long) unlocked.emplace();
  std::forward<Function>(function)();
}

// Copies from this size on run without the GIL: for less, releasing it costs more than it gains.
inline constexpr std::size_t kUnlockedCopy = std::size_t{128} << 10;

template <class Function>
void copy_unlocked(std::size_t bytes, Function&& function) {
  unlocked_if(bytes >= kUnlockedCopy, std::forward<Function>(function));
}

// Before a call that takes the engine's lock for a moment and needs the GIL, or is too short to
// release it: waits without the GIL while another thread has that lock.
inline void await_engine(runtime::Context& context) {
  if (context.abandoned() || context.try_lock().owns_lock()) return;
  const GilRelease unlocked;
  context.lock();
}

}  // namespace moolink::bind
