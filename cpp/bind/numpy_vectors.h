#pragma once

#include <nanobind/ndarray.h>

#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "bind/context.h"
#include "bind/tensor.h"
#include "memory/pool.h"

namespace moolink::bind {

// In C order; a list is converted.
template <class T>
using Given = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> span_of(const Given<T>& given) {
  return {given.data(), given.size()};
}

template <class T>
std::vector<T> vector_of(const Given<T>& given) {
  return {given.data(), given.data() + given.size()};
}

template <class T>
nb::object to_numpy(const std::vector<T>& values, tensor::DType dtype) {
  MutableBuffer memory = default_context()->pool().allocate(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(memory.data(), values.data(), memory.size());
  const auto size = static_cast<std::int64_t>(values.size());
  return export_tensor(std::move(memory), {wire::Framework::numpy, dtype, {}, {size}},
                       ArrayKind::numpy);
}

}  // namespace moolink::bind
