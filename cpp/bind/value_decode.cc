#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "bind/errors.h"
#include "bind/registered_types.h"
#include "bind/value.h"
#include "device/block.h"
#include "wire/value.h"

namespace moolink::bind {
namespace {

using wire::ValueTag;

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kLargeCopy = 64 << 10;  // smaller parts arrive in a frame: not counted
constexpr Py_ssize_t kMostFlags = 65536;      // values of one type

[[noreturn]] void fail(const std::string& message) { throw Exception(ErrorCode::wire, message); }

nb::object decode_text(std::string_view utf8) {
  return own(
      PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "surrogatepass"));
}

// Keys with equal hashes are compared with one another: only a few, unless a peer has made them so.
// A peer cannot know the hashes of strings and bytes.
class KeyHashes {
 public:
  void add(PyObject* key) {
    if (PyUnicode_CheckExact(key) != 0 || PyBytes_CheckExact(key) != 0) return;
    const Py_hash_t hash = PyObject_Hash(key);
    if (hash == -1) throw nb::python_error();
    if (++seen_[hash] > kMostEqual) fail("too many keys of a dict or set have one hash");
  }

 private:
  static constexpr unsigned kMostEqual = 64;
  std::map<Py_hash_t, unsigned> seen_;  // ordered: independent of the hashes
};

class ValueDecoder {
 public:
  ValueDecoder(const wire::Payload& payload, const ValueOptions& options)
      : payload_(payload), options_(options), reader_(payload, options.limits) {}

  nb::object read();

 private:
  nb::object read_big_integer(std::span<const std::byte> bytes);
  nb::object read_list(std::size_t size);
  nb::object read_tuple(std::size_t size);
  nb::object read_set(std::size_t size, bool frozen);
  nb::object read_dict(std::size_t size);
  nb::object read_registered(const wire::ValueToken& token);
  nb::object read_flags(const RegisteredType& type);
  nb::object read_record(const RegisteredType& type, std::size_t size);
  nb::object read_tensor(const wire::ValueToken& token);
  bool may_be_used(const Buffer& bytes, const wire::LentPart* lent) const;
  nb::object read_pickle(std::string_view bytes);

  const wire::Payload& payload_;
  const ValueOptions& options_;
  wire::ValueReader reader_;
};

nb::object ValueDecoder::read() {
  // Nested reads reuse the reader's token, so this passes on the needed values.
  const wire::ValueToken& token = reader_.next();
  const auto* chars = reinterpret_cast<const char*>(token.bytes.data());
  const auto size = static_cast<Py_ssize_t>(token.bytes.size());
  switch (token.tag) {
    case ValueTag::none:
      return nb::none();
    case ValueTag::false_:
      return nb::borrow(Py_False);
    case ValueTag::true_:
      return nb::borrow(Py_True);
    case ValueTag::integer:
      return own(PyLong_FromLongLong(token.integer));
    case ValueTag::big_integer:
      return read_big_integer(token.bytes);
    case ValueTag::real:
      return own(PyFloat_FromDouble(token.number.real()));
    case ValueTag::complex:
      return own(PyComplex_FromDoubles(token.number.real(), token.number.imag()));
    case ValueTag::string:
      return decode_text(token.text());
    case ValueTag::bytes:
      return own(PyBytes_FromStringAndSize(chars, size));
    case ValueTag::bytearray:
      return own(PyByteArray_FromStringAndSize(chars, size));
    case ValueTag::list:
      return read_list(token.size);
    case ValueTag::tuple:
      return read_tuple(token.size);
    case ValueTag::set:
      return read_set(token.size, false);
    case ValueTag::frozenset:
      return read_set(token.size, true);
    case ValueTag::dict:
      return read_dict(token.size);
    case ValueTag::record:
    case ValueTag::member:
    case ValueTag::flags:
    case ValueTag::convert:
      return read_registered(token);
    case ValueTag::scalar:
      return export_scalar(token.bytes, reader_.tensor());
    case ValueTag::tensor:
    case ValueTag::device_tensor:
      return read_tensor(token);
    case ValueTag::pickle:
      return read_pickle(token.text());
  }
  fail("unknown kind of value");
}

nb::object ValueDecoder::read_big_integer(std::span<const std::byte> bytes) {
  const nb::handle type(reinterpret_cast<PyObject*>(&PyLong_Type));
  return type.attr("from_bytes")(
      nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size()), "little",
      nb::arg("signed") = true);
}

// The reader has checked sizes against the bytes that remain before they get here.
nb::object ValueDecoder::read_list(std::size_t size) {
  nb::object list = own(PyList_New(static_cast<Py_ssize_t>(size)));
  for (std::size_t i = 0; i < size; ++i) {
    NB_LIST_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), read().release().ptr());
  }
  return list;
}

nb::object ValueDecoder::read_tuple(std::size_t size) {
  nb::object tuple = own(PyTuple_New(static_cast<Py_ssize_t>(size)));
  for (std::size_t i = 0; i < size; ++i) {
    NB_TUPLE_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), read().release().ptr());
  }
  return tuple;
}

nb::object ValueDecoder::read_set(std::size_t size, bool frozen) {
  nb::object set = own(frozen ? PyFrozenSet_New(nullptr) : PySet_New(nullptr));
  KeyHashes hashes;
  for (std::size_t i = 0; i < size; ++i) {
    const nb::object item = read();
    hashes.add(item.ptr());
    if (PySet_Add(set.ptr(), item.ptr()) != 0) throw nb::python_error();
  }
  return set;
}

nb::object ValueDecoder::read_dict(std::size_t size) {
  nb::object dict = own(PyDict_New());
  KeyHashes hashes;
  for (std::size_t i = 0; i < size; ++i) {
    const nb::object key = read();
    hashes.add(key.ptr());
    const nb::object value = read();
    if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) != 0) throw nb::python_error();
  }
  return dict;
}

bool form_matches(TypeForm form, ValueTag tag) {
  switch (tag) {
    case ValueTag::record:
      return form == TypeForm::dataclass || form == TypeForm::namedtuple;
    case ValueTag::member:
      return form == TypeForm::enumeration;
    case ValueTag::flags:
      return form == TypeForm::flags;
    default:
      return form == TypeForm::converted;
  }
}

nb::object ValueDecoder::read_registered(const wire::ValueToken& token) {
  const wire::TypeHead& head = reader_.types()[token.type];
  const RegisteredType* type = find_registered_late(std::string_view(head.name));
  if (type == nullptr) {
    fail("the peer sent a value of type " + head.name +
         ", which is not registered here: call moolink.register on the type at both peers");
  }
  if (!form_matches(type->form, token.tag) || type->head.fields != head.fields) {
    fail("the type " + head.name +
         " differs between the peers (its kind or its fields): run the same version at both");
  }
  switch (token.tag) {
    case ValueTag::record:
      return read_record(*type, token.size);
    case ValueTag::member:
      return type->type[decode_text(token.text())];
    case ValueTag::flags:
      return read_flags(*type);
    default:
      return type->from_state(read());
  }
}

// Python keeps every value of flags that was ever made.
nb::object ValueDecoder::read_flags(const RegisteredType& type) {
  const nb::object value = read();
  if (!PyLong_Check(value.ptr())) fail("flags that are no integer");
  const nb::object kept = nb::getattr(type.type, "_value2member_map_", nb::none());
  if (PyDict_Check(kept.ptr()) && PyDict_Size(kept.ptr()) >= kMostFlags &&
      !nb::cast<bool>(kept.attr("__contains__")(value))) {
    fail("more than " + std::to_string(kMostFlags) + " different values of the flags " +
         type.head.name);
  }
  return type.type(value);
}

// By PyType_GetSlot, as the stable ABI hides the fields of a type.
newfunc new_of(PyTypeObject& type) {
  return reinterpret_cast<newfunc>(PyType_GetSlot(&type, Py_tp_new));
}

// The type's own code does not run: fields are set as they were sent, frozen or not.
nb::object ValueDecoder::read_record(const RegisteredType& type, std::size_t size) {
  auto* python_type = reinterpret_cast<PyTypeObject*>(type.type.ptr());
  if (type.form == TypeForm::namedtuple) {
    const nb::object arguments = nb::make_tuple(read_tuple(size));
    return own(new_of(PyTuple_Type)(python_type, arguments.ptr(), nullptr));
  }
  const nb::object none = own(PyTuple_New(0));
  nb::object object = own(new_of(PyBaseObject_Type)(python_type, none.ptr(), nullptr));
  for (const nb::object& name : type.field_names) {
    const nb::object value = read();
    if (PyObject_GenericSetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) {
      throw nb::python_error();
    }
  }
  return object;
}

bool is_aligned(const std::byte* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kAlignment == 0;
}

nb::object ValueDecoder::read_tensor(const wire::ValueToken& token) {
  const Buffer* part = token.part == wire::kNoPart ? nullptr : &payload_.parts[token.part];
  const std::span<const std::byte> bytes = part == nullptr ? token.bytes : part->span();
  if (const auto device = device_for(reader_.tensor(), options_.arrays, options_.device)) {
    return export_to_device(bytes, reader_.tensor(), options_.arrays, *device);
  }
  const bool on_device = part != nullptr && device::block_of(*part) != nullptr;
  const wire::LentPart* lent =
      part == nullptr || on_device ? nullptr : payload_.find_lent(token.part);
  MutableBuffer memory;
  if (part != nullptr && !on_device && may_be_used(*part, lent)) {
    // The receiver owns a message's parts: no other code reads them from here on. Lent ones become
    // arrays that cannot be written.
    memory = {std::const_pointer_cast<void>(part->owner()), const_cast<std::byte*>(bytes.data()),
              bytes.size()};
  } else {
    // Small ones arrive in their message's frame, and must be copied out of it.
    if (options_.copies != nullptr && !on_device &&
        (lent != nullptr || bytes.size() >= kLargeCopy)) {
      options_.copies->add(lent == nullptr ? CopyReason::alignment : CopyReason::lent,
                           bytes.size());
    }
    memory = host_copy(bytes);
  }
  const bool read_only = lent != nullptr && !options_.reads_only;
  return export_tensor(std::move(memory), reader_.tensor(), options_.arrays, read_only);
}

// Whether an array may own the part itself; otherwise it is copied.
bool ValueDecoder::may_be_used(const Buffer& bytes, const wire::LentPart* lent) const {
  if (bytes.owner() == nullptr) return false;
  if (lent == nullptr || lent->copied) return is_aligned(bytes.data());
  // Only numpy's arrays can be read-only. A lent view may begin at any address.
  const std::size_t item = reader_.tensor().item_size();
  const ArrayKind kind = array_kind(reader_.tensor(), options_.arrays);
  const bool may_be_view =
      kind == ArrayKind::numpy || (kind == ArrayKind::torch && options_.reads_only);
  return may_be_view && reinterpret_cast<std::uintptr_t>(bytes.data()) % item == 0;
}

nb::object ValueDecoder::read_pickle(std::string_view bytes) {
  if (!options_.allow_pickle) {
    fail("the peer sent a pickled object, which this peer does not allow (allow_pickle=True)");
  }
  if (payload_.from_guest) {
    fail(
        "the peer sent a pickled object and has a group's key only: this peer, which has the job's "
        "token, takes pickles only from others that have it");
  }
  return nb::module_::import_("pickle").attr("loads")(nb::bytes(bytes.data(), bytes.size()));
}

}  // namespace

nb::object decode_value(const wire::Payload& payload, const ValueOptions& options) {
  try {
    return ValueDecoder(payload, options).read();
  } catch (nb::python_error& e) {
    // An unhashable key, an unknown name of an enum, a converter that raised. Exceptions not caused
    // by the bytes (Ctrl-C, no memory left) propagate.
    if (!e.matches(PyExc_Exception) || e.matches(PyExc_MemoryError)) throw;
    fail("a received value could not be built: " + text_of(e.type().attr("__name__")) + ": " +
         text_of(e.value()));
  } catch (nb::cast_error&) {
    fail("a received value is of an unexpected type");
  }
}

std::pair<nb::tuple, nb::dict> decode_call(const wire::Payload& payload,
                                           const ValueOptions& options) {
  const nb::object value = decode_value(payload, options);
  const auto is_call = [&] {
    PyObject* pair = value.ptr();
    return PyTuple_CheckExact(pair) != 0 && NB_TUPLE_GET_SIZE(pair) == 2 &&
           PyTuple_CheckExact(NB_TUPLE_GET_ITEM(pair, 0)) != 0 &&
           PyDict_CheckExact(NB_TUPLE_GET_ITEM(pair, 1)) != 0 &&
           PyArg_ValidateKeywordArguments(NB_TUPLE_GET_ITEM(pair, 1)) != 0;
  };
  if (!is_call()) {
    PyErr_Clear();
    fail("the arguments of a call are not a tuple and a dict with names");
  }
  return {nb::borrow<nb::tuple>(NB_TUPLE_GET_ITEM(value.ptr(), 0)),
          nb::borrow<nb::dict>(NB_TUPLE_GET_ITEM(value.ptr(), 1))};
}

}  // namespace moolink::bind
