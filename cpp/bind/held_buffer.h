#pragma once

#include <nanobind/nanobind.h>

namespace moolink::bind {

namespace nb = nanobind;

// Memory of a Python object, held while this lives.
class HeldBuffer {
 public:
  HeldBuffer(nb::handle object, int flags) {  // raises like Python
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;
  ~HeldBuffer() { PyBuffer_Release(&view_); }

  [[nodiscard]] const Py_buffer& view() const { return view_; }
  template <class T>
  [[nodiscard]] T* data() const {
    return static_cast<T*>(view_.buf);
  }

 private:
  Py_buffer view_{};
};

}  // namespace moolink::bind
