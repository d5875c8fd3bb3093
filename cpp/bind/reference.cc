#include "bind/reference.h"

#include <atomic>
#include <mutex>
#include <vector>

namespace moolink::bind {
namespace {

struct Dropped {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::vector<PyObject*> objects;
};

// Never destroyed: references may be dropped until the very end of the process.
Dropped& dropped() {
  static Dropped* const queue = new Dropped;
  return *queue;
}

void drop(PyObject* object) {
  Dropped& queue = dropped();
  const std::lock_guard guard(queue.mutex);
  queue.objects.push_back(object);
  queue.any = true;
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
