#pragma once

// Locks that take Python's garbage collector into account: it may run at any allocation, and calls
// the user's destructors there.

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <thread>

namespace moolink::bind {

namespace nb = nanobind;

// Whether this thread collects garbage now.
bool in_collection();

// The lock of the classes that are written in Python: as threading.RLock, except that a thread
// that holds one collects no garbage (docs/design/runtime.md). All methods need the GIL.
class PyLock {
 public:
  PyLock();
  ~PyLock();
  PyLock(const PyLock&) = delete;
  PyLock& operator=(const PyLock&) = delete;

  // `timeout` in seconds; negative: none.
  bool acquire(bool blocking, double timeout);
  void release();
  bool is_held_here() const { return holder_ == std::this_thread::get_id(); }
  // Releases all of this thread's acquisitions; returns their number.
  std::size_t release_all();
  void acquire_again(std::size_t depth);
  // Keeps the object until this thread holds no PyLock.
  void drop_later(nb::object object);

 private:
  void require_held() const;
  bool wait(std::optional<double> timeout);
  void taken(std::size_t depth);
  std::size_t let_go();

  struct Free {
    void operator()(void* lock) const { PyThread_free_lock(lock); }
  };
  std::unique_ptr<void, Free> lock_;
  std::thread::id holder_;
  std::size_t depth_ = 0;
};

}  // namespace moolink::bind
