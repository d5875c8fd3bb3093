#pragma once

// References to Python objects that C++ threads without the GIL may hold.

#include <nanobind/nanobind.h>

#include <memory>

namespace moolink::bind {

namespace nb = nanobind;

// May be copied and dropped on any thread, with or without the GIL and under any lock: a thread
// that holds the GIL and no lock releases the object soon.
class Reference {
 public:
  Reference() = default;
  explicit Reference(nb::object object);  // needs the GIL

  PyObject* get() const { return object_.get(); }
  nb::object borrow() const { return nb::borrow(object_.get()); }  // needs the GIL
  explicit operator bool() const { return object_ != nullptr; }

 private:
  std::shared_ptr<PyObject> object_;
};

// Releases the references dropped so far; needs the GIL. Runs the user's destructors.
void release_dropped();

}  // namespace moolink::bind
