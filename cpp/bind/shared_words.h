#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace moolink::bind {

namespace nb = nanobind;

// Words of memory that processes share, read and written atomically, in one order for all.
class SharedWords {
 public:
  using Array = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  explicit SharedWords(Array words) : words_(std::move(words)) {}

  std::uint64_t load(std::size_t index) const;
  void store(std::size_t index, std::uint64_t value);
  std::uint64_t sum(std::size_t first, std::size_t stride, std::size_t count) const;
  bool push(std::size_t line, std::size_t ring, std::size_t capacity, std::uint64_t entry);
  bool ask(std::size_t goal, std::uint64_t wanted, std::size_t first, std::size_t stride,
           std::size_t count, int bell);
  bool serve(std::size_t served, std::size_t goal, std::size_t first, std::size_t stride,
             std::size_t count);

 private:
  std::uint64_t& word(std::size_t index) const;

  Array words_;
};

}  // namespace moolink::bind
