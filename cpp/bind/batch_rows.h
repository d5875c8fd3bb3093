#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bind/held_buffer.h"
#include "bind/tensor_kinds.h"

namespace moolink::bind {

namespace nb = nanobind;

// The rows of a batch: a nest of exact dicts, tuples, namedtuples and lists, whose leaves are numpy
// arrays or torch tensors in host memory, each with the rows as its first dimension. Copies an item
// with exactly this structure, these dtypes and shapes, without gaps; Python handles the others.
class BatchRows {
 public:
  // Throws nb::value_error for a batch of another kind.
  explicit BatchRows(nb::handle batch);
  BatchRows(const BatchRows&) = delete;
  BatchRows& operator=(const BatchRows&) = delete;

  // Whether the item was copied to `row`; false: nothing was. One thread at a time.
  bool put(nb::handle item, std::size_t row);

 private:
  struct Leaf {
    nb::object array;
    const DLPackExchangeAPI* api = nullptr;  // of torch; numpy's memory is in `buffer`
    std::unique_ptr<HeldBuffer> buffer;
    std::byte* data = nullptr;
    std::size_t row_bytes = 0;
    DLDataType dtype{};
    std::vector<std::int64_t> shape;  // of a row
  };
  struct Node {
    PyTypeObject* type = nullptr;  // exact
    std::vector<nb::object> keys;  // of a dict
    std::vector<Node> parts;
    std::size_t leaf = 0;
  };

  Node build(nb::handle batch);
  std::size_t add_leaf(nb::handle array);
  bool find_sources(const Node& node, PyObject* item);
  bool find_source(const Leaf& leaf, std::size_t index, PyObject* array);
  bool find_torch_source(const Leaf& leaf, std::size_t index, PyObject* tensor);
  bool find_numpy_source(const Leaf& leaf, std::size_t index, PyObject* array);

  std::vector<Leaf> leaves_;
  Node root_;
  std::size_t rows_ = 0;
  std::size_t item_bytes_ = 0;
  std::vector<const std::byte*> sources_;  // of the item being copied, one for each leaf
  std::vector<nb::object> owners_;         // of the sources: Python runs before they are copied
  nb::object is_neg_name_;
};

}  // namespace moolink::bind
