#include "bind/reference.h"

#include <atomic>
#include <list>
#include <mutex>
#include <utility>

#include "base/at_fork.h"
#include "bind/gil.h"

namespace moolink::bind {
namespace {

struct Dropped {
  std::atomic<bool> any{false};
  std::atomic<bool> asked{false};  // the interpreter, to release them
  std::mutex mutex;
  HeldOverForks over_forks{mutex};
  std::list<PyObject*> objects;
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
class Drop {
 public:
  // Allocates here, so that the call operator need not.
  explicit Drop(PyObject* object) : one_{object} {}

  void operator()(PyObject*) noexcept {
    Dropped& queue = dropped();
    {
      const std::lock_guard guard(queue.mutex);
      queue.objects.splice(queue.objects.end(), one_);
      queue.any = true;
    }
    if (exiting || queue.asked.exchange(true)) return;
    if (Py_AddPendingCall(release_pending, nullptr) != 0) queue.asked = false;  // it is full
  }

 private:
  std::list<PyObject*> one_;
};

}  // namespace

Reference::Reference(nb::object object) {
  Drop drop(object.ptr());
  // The deleter runs even if this throws.
  object_ = std::shared_ptr<PyObject>(object.release().ptr(), std::move(drop));
}

void release_dropped() {
  Dropped& queue = dropped();
  if (!queue.any.load(std::memory_order_relaxed)) return;
  std::list<PyObject*> objects;
  {
    const std::lock_guard guard(queue.mutex);
    objects.swap(queue.objects);
    queue.any = false;
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

}  // namespace moolink::bind
