#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bind/device.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/reference.h"
#include "bind/registered_types.h"
#include "bind/value.h"
#include "device/block.h"
#include "runtime/peer/rpc_peer.h"
#include "wire/value.h"

namespace moolink::bind {
namespace {

// Copies from this size on run without the GIL; for shorter ones releasing it costs more.
constexpr std::size_t kLargeCopy = 64 << 10;
// Smaller parts are not worth a request for the receiver's memory.
constexpr std::size_t kSmallestPlaced = 64 << 10;
// Blocks have 2 MB, and parts must not travel in the frame of their message.
constexpr std::size_t kSmallestOnDevice = 1 << 20;
// Of a message, beside the value's arrays: the value's body, and the operation's header.
constexpr std::size_t kOtherParts = 2;

std::span<const std::byte> bytes_of(const char* data, Py_ssize_t size) {
  return std::as_bytes(std::span(data, static_cast<std::size_t>(size)));
}

std::span<const std::byte> bytes_of(const nb::bytes& value) {
  return std::as_bytes(std::span(value.c_str(), value.size()));
}

// Keeps lent memory while it may have a reader, and then reports its release.
struct LentMemory {
  Reference array;
  std::shared_ptr<const void> of_message;
  std::shared_ptr<const void> of_value;
};

class ValueEncoder {
 public:
  ValueEncoder(const ValueOptions& options, Lender* lender)
      : options_(options), lender_(lender), writer_(options.limits) {}

  void write(PyObject* value);
  void write_call(PyObject* args, PyObject* kwargs) {
    writer_.begin(wire::ValueTag::tuple, 2);
    depth_ = 1;
    write(args);
    write(kwargs);
  }
  wire::Payload finish(Allocator& allocator);

 private:
  bool write_plain(PyObject* value, PyTypeObject* type);
  bool write_container(PyObject* value, PyTypeObject* type);
  void write_other(PyObject* value);
  void write_integer(PyObject* value);
  void write_string(PyObject* value);
  void write_list(PyObject* value);
  void write_tuple_items(PyObject* value);
  void write_set_items(PyObject* value);
  void write_dict(PyObject* value);
  void write_registered(const RegisteredType& type, PyObject* value);
  void write_lent(const PyLent& lent);
  void write_tensor(ImportedTensor tensor);
  Buffer lend(const ImportedTensor& tensor, std::size_t size);
  void write_pickle(PyObject* value);
  [[noreturn]] void refuse(PyObject* value) const;

  // One level of nesting, while it lives.
  struct Level {
    explicit Level(ValueEncoder& encoder) : encoder_(encoder) {
      if (++encoder_.depth_ > encoder_.options_.limits.max_depth) encoder_.too_deep();
    }
    ~Level() { --encoder_.depth_; }
    ValueEncoder& encoder_;
  };
  [[noreturn]] void too_deep();

  struct Part {
    ImportedTensor tensor;
    bool lent = false;
    Buffer bytes = {};                                        // of a part lent in place
    std::shared_ptr<wire::StandingGrant> standing = nullptr;  // the bytes were captured into it
    std::shared_ptr<const void> released = nullptr;           // of a Lent whose bytes are copied
  };
  void capture(Part& part, Allocator& allocator, DeviceCopies& copies);
  void capture_parts(Allocator& allocator);

  const ValueOptions& options_;
  Lender* lender_;
  wire::ValueWriter writer_;
  std::vector<Part> parts_;
  bool lending_ = false;                          // inside a Lent
  std::shared_ptr<const void> message_released_;  // held by the readers of the lent memory
  std::shared_ptr<const void> value_released_;    // ... in the Lent being written
  std::size_t tensor_bytes_ = 0;
  std::size_t copied_bytes_ = 0;
  bool on_device_ = false;  // a part is
  std::size_t depth_ = 0;
};

void ValueEncoder::too_deep() {
  --depth_;  // the level was not entered
  throw Exception(ErrorCode::invalid_argument, "the value is nested deeper than " +
                                                   std::to_string(options_.limits.max_depth) +
                                                   " levels, or contains itself");
}

void ValueEncoder::write(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  if (write_plain(value, type) || write_container(value, type)) return;
  write_other(value);
}

// Exact types only: a subclass means something else, and would lose that on its way.
bool ValueEncoder::write_plain(PyObject* value, PyTypeObject* type) {
  if (value == Py_None) {
    writer_.none();
  } else if (type == &PyBool_Type) {
    writer_.boolean(value == Py_True);
  } else if (type == &PyLong_Type) {
    write_integer(value);
  } else if (type == &PyFloat_Type) {
    writer_.real(PyFloat_AsDouble(value));
  } else if (type == &PyUnicode_Type) {
    write_string(value);
  } else if (type == &PyBytes_Type) {
    writer_.bytes(wire::ValueTag::bytes, bytes_of(PyBytes_AsString(value), PyBytes_Size(value)));
  } else if (type == &PyByteArray_Type) {
    writer_.bytes(wire::ValueTag::bytearray,
                  bytes_of(PyByteArray_AsString(value), PyByteArray_Size(value)));
  } else if (type == &PyComplex_Type) {
    writer_.complex({PyComplex_RealAsDouble(value), PyComplex_ImagAsDouble(value)});
  } else {
    return false;
  }
  return true;
}

bool ValueEncoder::write_container(PyObject* value, PyTypeObject* type) {
  if (type == &PyTuple_Type) {
    const Level level(*this);
    writer_.begin(wire::ValueTag::tuple, static_cast<std::size_t>(NB_TUPLE_GET_SIZE(value)));
    write_tuple_items(value);
  } else if (type == &PyDict_Type) {
    write_dict(value);
  } else if (type == &PyList_Type) {
    write_list(value);
  } else if (type == &PySet_Type || type == &PyFrozenSet_Type) {
    const Level level(*this);
    writer_.begin(type == &PySet_Type ? wire::ValueTag::set : wire::ValueTag::frozenset,
                  static_cast<std::size_t>(NB_SET_GET_SIZE(value)));
    write_set_items(value);
  } else {
    return false;
  }
  return true;
}

void ValueEncoder::write_integer(PyObject* value) {
  int overflow = 0;
  const long long small = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow == 0) return writer_.integer(small);
  const nb::handle number(value);
  const auto bits = nb::cast<std::size_t>(number.attr("bit_length")());
  const nb::object encoded =
      number.attr("to_bytes")(bits / 8 + 1, "little", nb::arg("signed") = true);
  writer_.bytes(wire::ValueTag::big_integer, bytes_of(nb::cast<nb::bytes>(encoded)));
}

void ValueEncoder::write_string(PyObject* value) {
  Py_ssize_t size = 0;
  if (const char* utf8 = PyUnicode_AsUTF8AndSize(value, &size); utf8 != nullptr) {
    return writer_.string({utf8, static_cast<std::size_t>(size)});
  }
  // Lone surrogates (undecodable file names) are legal in a str, not in UTF-8.
  if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError) == 0) throw nb::python_error();
  PyErr_Clear();
  const nb::object encoded = own(PyUnicode_AsEncodedString(value, "utf-8", "surrogatepass"));
  writer_.string(
      {PyBytes_AsString(encoded.ptr()), static_cast<std::size_t>(PyBytes_Size(encoded.ptr()))});
}

[[noreturn]] void changed(const char* what) {
  throw Exception(ErrorCode::invalid_argument,
                  std::string("a ") + what + " changed while it was being sent");
}

void ValueEncoder::write_list(PyObject* value) {
  const Level level(*this);
  const Py_ssize_t size = NB_LIST_GET_SIZE(value);
  writer_.begin(wire::ValueTag::list, static_cast<std::size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    // An item may run Python code (an array's export), and that may change the list.
    if (NB_LIST_GET_SIZE(value) != size) changed("list");
    const nb::object item = nb::borrow(NB_LIST_GET_ITEM(value, i));
    write(item.ptr());
  }
  if (NB_LIST_GET_SIZE(value) != size) changed("list");
}

void ValueEncoder::write_tuple_items(PyObject* value) {
  for (Py_ssize_t i = 0; i < NB_TUPLE_GET_SIZE(value); ++i) write(NB_TUPLE_GET_ITEM(value, i));
}

void ValueEncoder::write_set_items(PyObject* value) {
  const Py_ssize_t size = NB_SET_GET_SIZE(value);
  const nb::object iterator = own(PyObject_GetIter(value));
  // The iterator notices a set that changes its size, not one that loses and gains an item.
  Py_ssize_t written = 0;
  while (PyObject* item = PyIter_Next(iterator.ptr())) {
    const nb::object owner = nb::steal(item);
    if (written++ == size) changed("set");
    write(owner.ptr());
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  if (written != size) changed("set");
}

void ValueEncoder::write_dict(PyObject* value) {
  const Level level(*this);
  const Py_ssize_t size = NB_DICT_GET_SIZE(value);
  writer_.begin(wire::ValueTag::dict, static_cast<std::size_t>(size));
  Py_ssize_t position = 0;
  Py_ssize_t written = 0;
  PyObject* key = nullptr;
  PyObject* item = nullptr;
  while (PyDict_Next(value, &position, &key, &item) != 0) {
    if (written++ == size) changed("dict");
    const nb::object key_owner = nb::borrow(key);
    const nb::object item_owner = nb::borrow(item);
    write(key);
    write(item);
  }
  if (written != size || NB_DICT_GET_SIZE(value) != size) changed("dict");
}

// The cheap checks first; a registered type overrides the meaning of its base.
void ValueEncoder::write_other(PyObject* value) {
  if (const PyLent* lent = PyLent::of(value)) return write_lent(*lent);
  if (const RegisteredType* type = find_registered(Py_TYPE(value))) {
    return write_registered(*type, value);
  }
  std::string scalar;
  if (const auto head = import_scalar(value, scalar)) {
    return writer_.scalar(*head, std::as_bytes(std::span(scalar)));
  }
  if (std::optional<ImportedTensor> tensor = import_tensor(value)) {
    return write_tensor(std::move(*tensor));
  }
  if (const RegisteredType* type = find_registered_late(Py_TYPE(value))) {
    return write_registered(*type, value);
  }
  if (!options_.allow_pickle) refuse(value);
  write_pickle(value);
}

void ValueEncoder::write_registered(const RegisteredType& type, PyObject* value) {
  const Level level(*this);
  const nb::handle object(value);
  switch (type.form) {
    case TypeForm::dataclass:
      writer_.begin(wire::ValueTag::record, type.head);
      for (const nb::object& field : type.field_names) write(object.attr(field).ptr());
      return;
    case TypeForm::namedtuple:
      if (static_cast<std::size_t>(NB_TUPLE_GET_SIZE(value)) != type.head.fields.size()) {
        changed("namedtuple");
      }
      writer_.begin(wire::ValueTag::record, type.head);
      return write_tuple_items(value);
    case TypeForm::enumeration: {
      const nb::object name = object.attr("_name_");
      Py_ssize_t size = 0;
      const char* utf8 = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
      if (utf8 == nullptr) throw nb::python_error();
      return writer_.member(type.head, {utf8, static_cast<std::size_t>(size)});
    }
    case TypeForm::flags:
      writer_.begin(wire::ValueTag::flags, type.head);
      return write(object.attr("_value_").ptr());
    case TypeForm::converted:
      writer_.begin(wire::ValueTag::convert, type.head);
      return write(nb::object(type.to_state(object)).ptr());
  }
}

void ValueEncoder::write_tensor(ImportedTensor tensor) {
  const std::size_t size = tensor.bytes();
  if (options_.copies != nullptr) options_.copies->add(tensor.copy_reason(), size);
  if (size <= wire::kInlineTensorBytes) {
    std::byte elements[wire::kInlineTensorBytes];
    unlocked_if(tensor.stream != nullptr, [&] { copy_elements(tensor, elements); });
    return writer_.inline_tensor(tensor.head(), {elements, size});
  }
  const Limits& limits = options_.limits;
  const std::size_t most = limits.max_parts - kOtherParts;
  if (size > limits.max_part || size > limits.max_message - tensor_bytes_ ||
      parts_.size() == most) {
    throw Exception(ErrorCode::invalid_argument,
                    "the value's arrays exceed the limit of " + std::to_string(most) +
                        " arrays and " + std::to_string(limits.max_message) + " bytes a message");
  }
  tensor_bytes_ += size;
  writer_.part_tensor(tensor.head());
  // A device's memory is copied now, so the receiver gets bytes of its own.
  const bool on_device = tensor.stream != nullptr;
  const bool is_lent = lending_ && !on_device;
  on_device_ |= on_device;
  Part part{std::move(tensor), is_lent};
  if (is_lent) part.bytes = lend(part.tensor, size);
  if (part.bytes.empty()) {
    copied_bytes_ += size;
    part.released = value_released_;
  }
  parts_.push_back(std::move(part));
}

void ValueEncoder::write_lent(const PyLent& lent) {
  if (lender_ == nullptr) {
    throw nb::type_error("moolink.lend is for calls, replies and streams: nothing else can lend");
  }
  const Level level(*this);
  if (message_released_ == nullptr) {
    lender_->released = std::make_shared<runtime::Future>(lender_->context);
    message_released_ = runtime::on_release(lender_->context, lender_->released, {});
  }
  const bool outer = std::exchange(lending_, true);
  const std::shared_ptr<const void> outer_released = value_released_;
  if (auto own = lent.release(lender_->context)) {
    using Both = std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>;
    value_released_ = std::make_shared<Both>(std::move(own), outer_released);
  }
  write(lent.value().ptr());
  lending_ = outer;
  value_released_ = outer_released;
}

// The memory itself; empty: it has gaps, and must be copied.
Buffer ValueEncoder::lend(const ImportedTensor& tensor, std::size_t size) {
  if (!tensor.tensor.is_contiguous()) return {};
  auto memory = std::make_shared<LentMemory>();
  memory->array = Reference(tensor.owner);
  memory->of_message = message_released_;
  memory->of_value = value_released_;
  return {std::move(memory), tensor.tensor.data, size};
}

void ValueEncoder::write_pickle(PyObject* value) {
  const nb::object pickled = nb::module_::import_("pickle").attr("dumps")(nb::handle(value), 5);
  writer_.bytes(wire::ValueTag::pickle, bytes_of(nb::cast<nb::bytes>(pickled)));
}

void ValueEncoder::refuse(PyObject* value) const {
  type_error("a value of type " + type_text(value) +
             " cannot be sent: call moolink.register on the type at both peers (dataclasses, "
             "namedtuples, enums, or any type with to_state= and from_state=), or allow_pickle at "
             "both");
}

// On the device if the path reads it there, or straight into the receiver's memory if it has
// granted some: either saves a copy.
void ValueEncoder::capture(Part& part, Allocator& allocator, DeviceCopies& copies) {
  const std::size_t size = part.tensor.bytes();
  const bool on_device = part.tensor.stream != nullptr;
  const auto* recipient = lender_ != nullptr && lender_->recipient ? &*lender_->recipient : nullptr;
  if (recipient != nullptr && on_device && size >= kSmallestOnDevice &&
      recipient->sender.reads_device(recipient->receiver, part.tensor.stream->device())) {
    part.bytes = copies.keep(part.tensor);
    if (!part.bytes.empty()) return;
  }
  if (recipient != nullptr && !part.lent && size >= kSmallestPlaced) {
    if (auto placed = recipient->sender.place(recipient->receiver, size)) {
      if (on_device) {
        copies.add(part.tensor, placed->memory.data());
      } else {
        copy_elements_past_cache(part.tensor, placed->memory.data(), size);
      }
      part.standing = std::move(placed->standing);
      part.bytes = placed->memory;
      return;
    }
  }
  const MutableBuffer copy = allocator.allocate(size);
  if (on_device) {
    copies.add(part.tensor, copy.data());
  } else {
    copy_elements(part.tensor, copy.data());
  }
  part.bytes = copy;
}

void ValueEncoder::capture_parts(Allocator& allocator) {
  DeviceCopies copies;
  for (Part& part : parts_) {
    if (part.bytes.empty()) capture(part, allocator, copies);
  }
  copies.run();
}

wire::Payload ValueEncoder::finish(Allocator& allocator) {
  wire::Payload payload;
  payload.body = writer_.take();
  if (parts_.empty()) return payload;
  unlocked_if(copied_bytes_ >= kLargeCopy || on_device_, [&] { capture_parts(allocator); });
  payload.parts.reserve(parts_.size());
  for (Part& part : parts_) {
    const auto number = static_cast<std::uint32_t>(payload.parts.size());
    if (part.lent) {
      const auto place = lender_->context->lending().find(part.bytes.data(), part.bytes.size());
      wire::LentPart lent{number};
      if (place) {
        lent.segment = place->segment;
        lent.offset = place->offset;
      }
      payload.lent.push_back(lent);
    } else if (auto place = device::place_of(part.bytes)) {
      payload.lent.push_back({number, place->block | wire::kDeviceSegments, place->offset, false,
                              std::move(place->lent)});
    } else if (part.standing != nullptr) {
      payload.placed.push_back({number, std::move(part.standing)});
    }
    payload.parts.push_back(std::move(part.bytes));
  }
  return payload;
}

}  // namespace

wire::Payload encode_value(nb::handle value, const ValueOptions& options, Allocator& allocator,
                           Lender* lender) {
  ValueEncoder encoder(options, lender);
  encoder.write(value.ptr());
  return encoder.finish(allocator);
}

wire::Payload encode_call(nb::tuple args, nb::dict kwargs, const ValueOptions& options,
                          Allocator& allocator, Lender* lender) {
  ValueEncoder encoder(options, lender);
  encoder.write_call(args.ptr(), kwargs.ptr());
  return encoder.finish(allocator);
}

}  // namespace moolink::bind
