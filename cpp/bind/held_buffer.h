#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>

#include "bind/tensor_kinds.h"

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
  [[nodiscard]] std::span<const Py_ssize_t> shape() const {
    return {view_.shape, static_cast<std::size_t>(view_.ndim)};
  }
  template <class T>
  [[nodiscard]] T* data() const {
    return static_cast<T*>(view_.buf);
  }

 private:
  Py_buffer view_{};
};

// The memory of an array without gaps of exactly this shape and format; null for any other object.
// It stays while the array does.
inline const std::byte* exact_memory(nb::handle array, std::span<const Py_ssize_t> shape,
                                     std::string_view format) {
  // A masked array is more than its memory; the callers' other paths refuse it.
  if (kind_of(array).importer == Importer::numpy_subclass) return nullptr;
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    PyErr_Clear();  // no array, one with gaps, or of a dtype without a buffer format
    return nullptr;
  }
  const std::span its(view.shape, static_cast<std::size_t>(view.ndim));
  const bool fits = std::ranges::equal(its, shape) && view.format == format;
  PyBuffer_Release(&view);
  return fits ? static_cast<const std::byte*>(view.buf) : nullptr;
}

}  // namespace moolink::bind
