#pragma once

// Giving up the GIL in a process that may end at any time.
//
// A daemon thread that asks for the GIL while the interpreter is being finalised is ended by
// CPython (before 3.14) with pthread_exit. Its unwinding would meet nanobind's frames, which end
// the process when that happens, and destructors that touch Python without the GIL. Such threads
// are parked instead, from moolink's exit hook on: all threads but daemons have ended by then.

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <utility>

#include "runtime/engine/context.h"
#include "runtime/engine/workers.h"

namespace moolink::bind {

// Set by the exit hook, which then ends the workers in an orderly way.
inline std::atomic<bool> exiting{false};

[[noreturn]] inline void park_forever() {
  while (true) pause();
}

// Whether this is a thread that will not be needed and must not meet the end of the interpreter.
inline bool to_be_parked() {
  return exiting && gettid() != getpid() && !runtime::Workers::on_worker_thread();
}

// At the entrance of what other threads call in loops; needs the GIL.
inline void park_if_exiting() {
  if (!to_be_parked()) return;
  PyEval_SaveThread();
  park_forever();
}

// Runs what takes the GIL or calls Python on a thread that may live until the end.
template <class Function>
auto survive_exit(Function&& function) {
  try {
    return std::forward<Function>(function)();
  } catch (abi::__forced_unwind&) {
    park_forever();
  }
}

// In place of nanobind::gil_scoped_release.
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

// Copies of as many bytes run without the GIL: to give it up for less costs more than it brings.
inline constexpr std::size_t kUnlockedCopy = std::size_t{128} << 10;

template <class Function>
void copy_unlocked(std::size_t bytes, Function&& function) {
  std::optional<GilRelease> unlocked;
  if (bytes >= kUnlockedCopy) unlocked.emplace();
  std::forward<Function>(function)();
}

// Before a call that takes the engine's lock for a moment and needs the GIL, or is too short to
// give it up: waits without the GIL while another thread has that lock.
inline void await_engine(runtime::Context& context) {
  if (context.abandoned() || context.try_lock().owns_lock()) return;
  const GilRelease unlocked;
  context.lock();
}

}  // namespace moolink::bind
