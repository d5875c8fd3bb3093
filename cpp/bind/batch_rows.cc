#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/held_buffer.h"
#include "bind/tensor_kinds.h"
#include "bind/torch_memory.h"
#include "tensor/layout.h"

namespace moolink::bind {

namespace nb = nanobind;

namespace {

bool same(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// A tensor of torch's own class in host memory without gaps, and its storage. Empty for other
// tensors, also for those for which torch raises, such as sparse ones.
struct TorchRow {
  DLTensor tensor;
  nb::object storage;
};

std::optional<TorchRow> exchanged(const DLPackExchangeAPI* api, PyObject* value) {
  if (kind_of(value).importer != Importer::torch) return std::nullopt;
  TorchRow row;
  try {
    row.storage = torch_storage(value);
    row.tensor = torch_description(value, api, row.storage);
  } catch (const nb::builtin_exception&) {
    return std::nullopt;
  } catch (const nb::python_error&) {
    return std::nullopt;
  }
  const DLTensor& tensor = row.tensor;
  const auto dims = static_cast<std::size_t>(tensor.ndim);
  const bool compact = tensor.strides == nullptr ||
                       tensor::is_contiguous({tensor.shape, dims}, {tensor.strides, dims});
  return tensor.device.device_type == kDLCPU && compact ? std::optional(std::move(row))
                                                        : std::nullopt;
}

[[noreturn]] void refuse_leaf() {
  throw nb::value_error("a leaf of the batch cannot be filled by rows");
}

// The rows of a batch: a nest of exact dicts, tuples, namedtuples and lists, whose leaves are numpy
// arrays or torch tensors in host memory, each with the rows as its first dimension. Copies an item
// with exactly this structure, these dtypes and shapes, without gaps; Python handles the others.
class BatchRows {
 public:
  // Throws nb::value_error for a batch of another kind.
  explicit BatchRows(nb::handle batch) : is_neg_name_(interned("is_neg")) {
    root_ = build(batch);
    if (leaves_.empty()) throw nb::value_error("the batch has no arrays");
    sources_.resize(leaves_.size());
  }

  BatchRows(const BatchRows&) = delete;
  BatchRows& operator=(const BatchRows&) = delete;

  // Whether the item was copied to `row`; false: nothing was. One thread at a time.
  bool put(nb::handle item, std::size_t row) {
    if (row >= rows_) throw nb::index_error("there is no such row");
    owners_.clear();
    const bool found = find_sources(root_, item.ptr());
    if (found) {
      copy_unlocked(item_bytes_, [&] {
        for (std::size_t i = 0; i < leaves_.size(); ++i) {
          const Leaf& leaf = leaves_[i];
          if (leaf.row_bytes == 0) continue;
          std::memcpy(leaf.data + row * leaf.row_bytes, sources_[i], leaf.row_bytes);
        }
      });
    }
    owners_.clear();
    return found;
  }

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

  Node build(nb::handle batch) {
    Node node;
    node.type = Py_TYPE(batch.ptr());
    if (PyDict_CheckExact(batch.ptr())) {
      for (const auto& [key, part] : nb::borrow<nb::dict>(batch)) {
        node.keys.push_back(nb::borrow(key));
        node.parts.push_back(build(part));
      }
    } else if (PyList_CheckExact(batch.ptr()) || PyTuple_Check(batch.ptr())) {
      for (const nb::handle part : nb::borrow<nb::sequence>(batch)) {
        node.parts.push_back(build(part));
      }
    } else {
      node.leaf = add_leaf(batch);
    }
    return node;
  }

  std::size_t add_leaf(nb::handle array) {
    Leaf leaf;
    leaf.array = nb::borrow(array);
    const TypeKind kind = kind_of(array);
    std::size_t rows = 0;
    if (kind.importer == Importer::torch && kind.api != nullptr &&
        kind.api->dltensor_from_py_object_no_sync != nullptr) {
      leaf.api = kind.api;
      const std::optional<TorchRow> row = exchanged(leaf.api, array.ptr());
      const DLTensor* tensor = row ? &row->tensor : nullptr;
      if (tensor == nullptr || tensor->ndim < 1 || tensor->dtype.code == kDLComplex ||
          tensor->dtype.bits % 8 != 0) {
        refuse_leaf();
      }
      leaf.data = static_cast<std::byte*>(tensor->data) + tensor->byte_offset;
      leaf.dtype = tensor->dtype;
      leaf.shape.assign(tensor->shape + 1, tensor->shape + tensor->ndim);
      rows = static_cast<std::size_t>(tensor->shape[0]);
      leaf.row_bytes = std::size_t{leaf.dtype.bits} / 8 * leaf.dtype.lanes;
    } else if (kind.importer == Importer::numpy) {
      try {
        leaf.buffer = std::make_unique<HeldBuffer>(array, PyBUF_CONTIG | PyBUF_FORMAT);
      } catch (const nb::python_error&) {  // a dtype without a buffer format
        refuse_leaf();
      }
      const Py_buffer& view = leaf.buffer->view();
      // References are counted, which a copy of bytes would not do.
      if (view.ndim < 1 || std::string_view(view.format).find('O') != std::string_view::npos) {
        refuse_leaf();
      }
      leaf.data = leaf.buffer->data<std::byte>();
      leaf.shape.assign(view.shape + 1, view.shape + view.ndim);
      rows = static_cast<std::size_t>(view.shape[0]);
      leaf.row_bytes = static_cast<std::size_t>(view.itemsize);
    } else {
      throw nb::value_error("a leaf of the batch is neither numpy's nor torch's");
    }
    for (const std::int64_t size : leaf.shape) leaf.row_bytes *= static_cast<std::size_t>(size);
    if (!leaves_.empty() && rows != rows_) throw nb::value_error("leaves differ in their rows");
    rows_ = rows;
    item_bytes_ += leaf.row_bytes;
    leaves_.push_back(std::move(leaf));
    return leaves_.size() - 1;
  }

  bool find_sources(const Node& node, PyObject* item) {
    if (Py_TYPE(item) != node.type) return false;
    if (node.type == &PyDict_Type) {
      if (static_cast<std::size_t>(NB_DICT_GET_SIZE(item)) != node.keys.size()) return false;
      for (std::size_t i = 0; i < node.keys.size(); ++i) {
        const nb::object part = nb::borrow(PyDict_GetItemWithError(item, node.keys[i].ptr()));
        if (!part.is_valid()) {
          if (PyErr_Occurred() != nullptr) throw nb::python_error();
          return false;
        }
        if (!find_sources(node.parts[i], part.ptr())) return false;
      }
      return true;
    }
    const bool is_list = PyList_CheckExact(item) != 0;
    if (is_list || PyTuple_Check(item)) {
      const auto size = static_cast<Py_ssize_t>(node.parts.size());
      for (Py_ssize_t i = 0; i < size; ++i) {
        // Another thread of the program may change a list meanwhile.
        if (Py_SIZE(item) != size) return false;
        const nb::object part =
            nb::borrow(is_list ? NB_LIST_GET_ITEM(item, i) : NB_TUPLE_GET_ITEM(item, i));
        if (!find_sources(node.parts[static_cast<std::size_t>(i)], part.ptr())) return false;
      }
      return Py_SIZE(item) == size;
    }
    return find_source(leaves_[node.leaf], node.leaf, item);
  }

  bool find_source(const Leaf& leaf, std::size_t index, PyObject* array) {
    if (leaf.api != nullptr) return find_torch_source(leaf, index, array);
    owners_.push_back(nb::borrow(array));
    sources_[index] = exact_memory(array, leaf.shape, leaf.buffer->view().format);
    return sources_[index] != nullptr;
  }

  bool find_torch_source(const Leaf& leaf, std::size_t index, PyObject* tensor) {
    std::optional<TorchRow> row = exchanged(leaf.api, tensor);
    const DLTensor* given = row ? &row->tensor : nullptr;
    if (given == nullptr || !same(given->dtype, leaf.dtype) ||
        !std::ranges::equal(std::span(given->shape, static_cast<std::size_t>(given->ndim)),
                            leaf.shape) ||
        (given->data == nullptr && leaf.row_bytes > 0)) {
      return false;
    }
    if (leaf.dtype.code == kDLFloat) {  // the memory of a negated view has other values
      const nb::object negated =
          own(PyObject_VectorcallMethod(is_neg_name_.ptr(), &tensor, 1, nullptr));
      if (negated.ptr() != Py_False) return false;
    }
    owners_.push_back(std::move(row->storage));
    sources_[index] = static_cast<const std::byte*>(given->data) + given->byte_offset;
    return true;
  }

  std::vector<Leaf> leaves_;
  Node root_;
  std::size_t rows_ = 0;
  std::size_t item_bytes_ = 0;
  std::vector<const std::byte*> sources_;  // of the item being copied, one for each leaf
  std::vector<nb::object> owners_;         // of the sources: Python runs before they are copied
  nb::object is_neg_name_;
};

}  // namespace

void bind_batch_rows(nb::module_& m) {
  nb::class_<BatchRows>(m, "BatchRows",
                        "The rows of a batch of numpy arrays and torch tensors on the host.")
      .def(nb::init<nb::handle>(), nb::arg("batch"),
           "Raises ValueError if the batch has other leaves.")
      .def("put", &BatchRows::put, nb::arg("item"), nb::arg("row"),
           "Copies an item of the batch's structure, dtypes and shapes to a row. Returns False, "
           "and copies nothing, if the item differs in any of them.");
}

}  // namespace moolink::bind
