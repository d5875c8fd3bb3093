#pragma once

// The values of a replay as arrays of numpy.

#include <nanobind/ndarray.h>

#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "bind/context.h"
#include "bind/tensor.h"
#include "memory/pool.h"
#include "replay/table.h"

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

// The element types that to_numpy() takes.
constexpr tensor::DType dtype_of(double) { return tensor::DType::float64; }
constexpr tensor::DType dtype_of(std::int64_t) { return tensor::DType::int64; }
constexpr tensor::DType dtype_of(std::uint64_t) { return tensor::DType::uint64; }
constexpr tensor::DType dtype_of(std::uint32_t) { return tensor::DType::uint32; }

template <class T>
nb::object to_numpy(const std::vector<T>& values) {
  MutableBuffer memory = default_context()->pool().allocate(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(memory.data(), values.data(), memory.size());
  const auto size = static_cast<std::int64_t>(values.size());
  return export_tensor(std::move(memory), {wire::Framework::numpy, dtype_of(T{}), {}, {size}},
                       ArrayKind::numpy);
}

// The state of a replay's table as a dict of numpy arrays, for checkpoints.
nb::dict to_dict(const replay::TableState& state);
// Throws Exception{invalid_argument} if the arrays do not belong to one another.
replay::TableState table_state(const nb::dict& state);

}  // namespace moolink::bind
