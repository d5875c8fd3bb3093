#include "bind/collector.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/gil.h"

namespace moolink::bind {
namespace {

constexpr double kLookForSignals = 0.05;  // seconds
// Collections of the youngest objects that are put off in succession before a full collection:
// the interpreter's own ratio of the two.
constexpr int kMostPutOff = 100;
constexpr int kOldest = 2;  // generation
// Python 3.12's full collections freeze its immortal objects, some 400. A program's gc.freeze()
// freezes all objects: with numpy, over 10,000.
constexpr std::size_t kFrozenByPython = 5000;

struct OfThread {
  bool collects = false;
  bool puts_off = false;
  std::size_t locks = 0;  // held by the thread
  std::vector<nb::object> dropped;
};
thread_local OfThread of_thread;

int put_off = 0;  // collections since the last full one; guarded by the GIL

struct Functions {
  nb::object freeze, unfreeze, get_freeze_count, collect, callbacks, callback;
};

Functions& functions() {
  static auto* const functions = new Functions;
  return *functions;
}

// The collector skips frozen objects, so it finds nothing. Freezing and unfreezing move lists, not
// objects. Unfrozen objects are in the oldest generation, which is collected rarely.
void collection_begins(int generation) {
  of_thread.collects = true;
  if (of_thread.locks == 0) {
    // Only a full collection finds what others put off: they moved it to the oldest generation.
    if (generation == kOldest) put_off = 0;
    return;
  }
  const Functions& gc = functions();
  // Unfreezing could not tell the objects that the program itself has frozen from the rest.
  if (nb::cast<std::size_t>(gc.get_freeze_count()) > kFrozenByPython) return;
  gc.freeze();
  of_thread.puts_off = true;
  ++put_off;
}

void collection_ends() {
  of_thread.collects = false;
  if (!std::exchange(of_thread.puts_off, false)) return;
  if (const Functions& gc = functions(); gc.unfreeze.is_valid()) gc.unfreeze();
}

// Objects that the destructors drop in turn go to a new list.
void drop_now() {
  while (!of_thread.dropped.empty()) std::exchange(of_thread.dropped, {});
}

void collect_what_was_put_off() {
  if (put_off < kMostPutOff || of_thread.collects) return;
  put_off = 0;
  functions().collect();
}

// At the interpreter's exit.
void leave_collector() {
  const Functions own = std::exchange(functions(), Functions());
  put_off = 0;
  if (own.callback.is_valid() && nb::cast<bool>(own.callbacks.attr("__contains__")(own.callback))) {
    own.callbacks.attr("remove")(own.callback);
  }
}

void watch_collector() {
  const nb::module_ gc = nb::module_::import_("gc");
  Functions& own = functions();
  own.freeze = gc.attr("freeze");
  own.unfreeze = gc.attr("unfreeze");
  own.get_freeze_count = gc.attr("get_freeze_count");
  own.collect = gc.attr("collect");
  own.callbacks = gc.attr("callbacks");
  own.callback = nb::cpp_function([](const nb::str& phase, const nb::dict& info) {
    if (phase.c_str() == std::string_view("start")) {
      collection_begins(nb::cast<int>(info["generation"]));
    } else {
      collection_ends();
    }
  });
  own.callbacks.attr("append")(own.callback);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(leave_collector));
}

}  // namespace

bool in_collection() { return of_thread.collects; }

PyLock::PyLock() : lock_(PyThread_allocate_lock()) {
  if (lock_ == nullptr) throw std::bad_alloc();
}

PyLock::~PyLock() {
  if (depth_ == 0) return;
  if (is_held_here()) --of_thread.locks;
  PyThread_release_lock(lock_.get());
}

bool PyLock::acquire(bool blocking, double timeout) {
  if (is_held_here()) {
    ++depth_;
    return true;
  }
  if (PyThread_acquire_lock(lock_.get(), NOWAIT_LOCK) == 0) {
    if (!blocking || !wait(timeout < 0 ? std::nullopt : std::optional(timeout))) return false;
  }
  taken(1);
  return true;
}

bool PyLock::wait(std::optional<double> timeout) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto interrupt = signal_check();
  const GilRelease unlocked;
  while (true) {
    double turn = kLookForSignals;
    if (timeout) {
      const std::chrono::duration<double> waited = Clock::now() - begin;
      turn = std::min(turn, *timeout - waited.count());
      if (turn < 0) return false;
    }
    const auto us = static_cast<PY_TIMEOUT_T>(turn * 1e6);
    if (PyThread_acquire_lock_timed(lock_.get(), us, 0) == PY_LOCK_ACQUIRED) return true;
    if (interrupt) interrupt();
  }
}

void PyLock::require_held() const {
  if (!is_held_here()) throw std::runtime_error("this thread does not hold the lock");
}

void PyLock::release() {
  require_held();
  if (--depth_ == 0) release_all();
}

std::size_t PyLock::release_all() {
  require_held();
  const std::size_t depth = let_go();
  if (of_thread.locks == 0) {
    drop_now();
    collect_what_was_put_off();
  }
  return depth;
}

void PyLock::acquire_again(std::size_t depth) {
  // An interrupt would leave the caller's section without its lock.
  if (PyThread_acquire_lock(lock_.get(), NOWAIT_LOCK) == 0) {
    const GilRelease unlocked;
    PyThread_acquire_lock(lock_.get(), WAIT_LOCK);
  }
  taken(depth);
}

void PyLock::drop_later(nb::object object) {
  require_held();
  of_thread.dropped.push_back(std::move(object));
}

void PyLock::taken(std::size_t depth) {
  holder_ = std::this_thread::get_id();
  depth_ = depth;
  ++of_thread.locks;
}

std::size_t PyLock::let_go() {
  holder_ = {};
  --of_thread.locks;
  const std::size_t depth = std::exchange(depth_, 0);
  PyThread_release_lock(lock_.get());
  return depth;
}

void bind_collector(nb::module_& m) {
  nb::class_<PyLock>(
      m, "Lock",
      "As threading.RLock, except that a thread that holds one collects no garbage, unless the "
      "program has frozen objects (gc.freeze): no destructor of the program can run there and wait "
      "for the lock, or for a thread that does. It also works with threading.Condition.")
      .def(nb::init<>())
      .def("acquire", &PyLock::acquire, nb::arg("blocking") = true, nb::arg("timeout") = -1.0,
           "Returns whether the lock is held now; `timeout` in seconds, negative for none.")
      .def("release", &PyLock::release, "Takes back one acquire().")
      .def("__enter__", [](PyLock& self) { return self.acquire(true, -1); })
      .def(
          "__exit__", [](PyLock& self, const nb::args&) { self.release(); },
          nb::sig(kExitSignature))
      .def("drop_later", &PyLock::drop_later, nb::arg("object").none(),
           "Keeps an object, of which this may be the last reference, until this thread holds no "
           "Lock any more.")
      // threading.Condition calls these methods of its lock.
      .def("_is_owned", &PyLock::is_held_here)
      .def("_release_save", &PyLock::release_all)
      .def("_acquire_restore", &PyLock::acquire_again, nb::arg("depth"));
  watch_collector();
}

}  // namespace moolink::bind
