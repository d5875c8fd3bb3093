#include "bind/reference.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "base/at_fork.h"
#include "bind/gil.h"

namespace moolink::bind {
namespace {

struct Dropped {
  std::atomic<bool> any{false};
  std::atomic<bool> asked{false};  // the interpreter, to release them
  std::mutex mutex;
  HeldOverForks over_forks{mutex};
  std::vector<PyObject*> objects;
};

// Never destroyed: references may be dropped until the very end of the process.
Dropped& dropped() {
  static Dropped* const queue = new Dropped;
  return *queue;
}

int release_pending(void*) {
  dropped().asked = false;
  release_dropped();
  return 0;
}

// A thread that enters from Python or runs a handler releases dropped references; for a program
// that does neither, the interpreter's list of pending calls does, which needs neither GIL nor
// lock.
void drop(PyObject* object) {
  Dropped& queue = dropped();
  {
    const std::lock_guard guard(queue.mutex);
    queue.objects.push_back(object);
    queue.any = true;
  }
  if (exiting || queue.asked.exchange(true)) return;
  if (Py_AddPendingCall(release_pending, nullptr) != 0) queue.asked = false;  // it is full
}

}  // namespace

Reference::Reference(nb::object object) : object_(object.release().ptr(), drop) {}

void release_dropped() {
  Dropped& queue = dropped();
  if (!queue.any.load(std::memory_order_relaxed)) return;
  std::vector<PyObject*> objects;
  {
    const std::lock_guard guard(queue.mutex);
    objects.swap(queue.objects);
    queue.any = false;
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

}  // namespace moolink::bind
