#include "bind/group.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "base/at_fork.h"
#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/deferred.h"
#include "bind/device.h"
#include "bind/errors.h"
#include "bind/future.h"
#include "bind/gil.h"
#include "bind/reference.h"

namespace moolink::bind {
namespace {

collective::ReduceOp parse_op(const std::string& name) {
  return value_named(collective::kOpNames, name, "op '",
                     "' is not one of sum, mean, min, max, prod, and, or, xor, nor a callable");
}

tensor::DType parse_dtype(const std::string& name) {
  if (const auto dtype = tensor::dtype_from_name(name)) return *dtype;
  throw Exception(ErrorCode::invalid_argument, "elements of type " + name + " cannot be reduced");
}

// Smaller inputs are copied at the call.
constexpr std::size_t kLentBytes = collective::kSharedBytes;

Buffer copy(const ImportedTensor& input, Allocator& pool) {
  const MutableBuffer bytes = pool.allocate(input.bytes());
  unlocked_if(input.stream != nullptr, [&] { copy_elements(input, bytes.data()); });
  return bytes;
}

// An array of numpy, torch or JAX; empty: anything else.
std::optional<ImportedTensor> import_plain(nb::handle array) {
  auto given = try_import(array);
  return given && given->framework != wire::Framework::other ? std::move(given) : std::nullopt;
}

// Whether the result of `given` can go into `place`: its own memory, or other memory; both the
// host's.
bool may_hold_result(const ImportedTensor& place, const ImportedTensor& given) {
  if (place.tensor.read_only || place.tensor.dtype != given.tensor.dtype ||
      place.tensor.shape != given.tensor.shape) {
    return false;
  }
  for (const ImportedTensor* tensor : {&place, &given}) {
    if (tensor->stream != nullptr || !tensor->tensor.is_contiguous()) return false;
  }
  const std::byte* to = place.tensor.data;
  const std::byte* from = given.tensor.data;
  return to == from || to + place.bytes() <= from || from + given.bytes() <= to;
}

// Combines the members' values with the user's operation, from rank 0 upwards.
std::variant<wire::Payload, Error> fold(const std::vector<wire::Payload>& values,
                                        nb::handle operation, const ValueOptions& options,
                                        const std::string& name) {
  try {
    Allocator& pool = default_context()->pool();
    // An operation may be retried after a change of the group: its inputs stay unchanged.
    nb::object result = decode_value(wire::private_copy(values.front(), pool), options);
    for (std::size_t rank = 1; rank < values.size(); ++rank) {
      result = operation(result, decode_value(wire::private_copy(values[rank], pool), options));
    }
    return encode_value(result, options, pool);
  } catch (nb::python_error& e) {
    return to_remote_error(e, name);
  } catch (const Exception& e) {
    return e.error();
  } catch (const std::exception& e) {  // the codec's: a result that cannot travel
    return remote_failure(
        name, "the result of the operation '" + name + "' cannot travel: " + e.what(), "TypeError");
  }
}

// The groups of this process, for compiled programs.
class ProgramGroups {
 public:
  // Never destroyed: programs may run until the very end of the process.
  static ProgramGroups& process() {
    static ProgramGroups* const known = new ProgramGroups;
    return *known;
  }

  std::string add(const std::shared_ptr<runtime::GroupPeer>& group) {
    const std::lock_guard guard(mutex_);
    std::string key = group->name();
    for (int number = 2; by_key_.contains(key) && !by_key_[key].expired(); ++number) {
      key = group->name() + "#" + std::to_string(number);
    }
    by_key_[key] = group;
    return key;
  }
  void remove(const std::string& key) {
    const std::lock_guard guard(mutex_);
    by_key_.erase(key);
  }
  std::shared_ptr<runtime::GroupPeer> find(const std::string& key) {
    const std::lock_guard guard(mutex_);
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  HeldOverForks over_forks_{mutex_};
  std::map<std::string, std::weak_ptr<runtime::GroupPeer>> by_key_;
};

}  // namespace

std::shared_ptr<runtime::GroupPeer> find_program_group(const std::string& key) {
  return ProgramGroups::process().find(key);
}

PyGroup::PyGroup(const PyRpc& rpc, const std::string& name) : options_(rpc.options()) {
  group_ = std::make_shared<runtime::GroupPeer>(rpc.peer(), name);
  program_key_ = ProgramGroups::process().add(group_);
}

void PyGroup::close() {
  if (!program_key_.empty()) ProgramGroups::process().remove(std::exchange(program_key_, {}));
  const GilRelease unlocked;
  group_->close();
}

namespace {

bool update(const PyGroup& self) {
  await_engine(self.context());
  return self.peer().update();
}

bool is_outdated(const PyGroup& self) {
  await_engine(self.context());
  return self.peer().is_outdated();
}

bool wait_for_members(const PyGroup& self, std::size_t count, std::optional<double> timeout) {
  return wait_unlocked(timeout, [&](Time deadline, const auto& interrupt) {
    return self.peer().wait_for_members(count, deadline, interrupt);
  });
}

bool closed(const PyGroup& self) {
  const runtime::Engine::Lock lock = self.context().lock();
  return self.peer().closed();
}

std::vector<std::string> members(const PyGroup& self) {
  std::vector<std::string> names;
  for (const auto& member : self.peer().view().members) names.push_back(member.name);
  return names;
}

std::optional<std::size_t> rank(const PyGroup& self) {
  return self.peer().view().rank_of(self.peer().rpc()->instance());
}

// A large contiguous input in host memory is not copied: it is used until the future is done.
nb::object start(const PyGroup& self, const std::string& name, collective::OpSpec spec,
                 const ImportedTensor& given, MutableBuffer output, PyFuture::Decode decode,
                 bool retry) {
  const bool lent =
      given.bytes() >= kLentBytes && given.stream == nullptr && given.tensor.is_contiguous();
  self.options().copies->add(given.copy_reason(), given.bytes());
  Buffer input = lent ? Buffer(given.memory()) : copy(given, self.context().pool());
  Subject subject{collective::kKindNames[spec.kind], name, {}};
  auto future = without_gil([&] {
    return self.peer().collective(name, std::move(spec), std::move(input), std::move(output), lent,
                                  retry);
  });
  return new_object<PyFuture>(std::move(future), std::move(decode), std::move(subject));
}

// `array`: this member's input, whatever its shape; `count`: elements of a block
// (collective/passage.h); `output`: where the result goes, or None: a new flat array, which the
// future returns. With `output` the future returns None.
nb::object collective_of(const PyGroup& self, const std::string& name, const std::string& kind,
                         std::uint32_t root, const std::string& op, const std::string& dtype,
                         const std::string& layout, std::int64_t count, nb::handle array,
                         nb::handle output, bool retry, const std::string& compress) {
  collective::OpSpec spec;
  spec.kind = value_named(collective::kKindNames, kind, "there is no collective '", "'");
  spec.root = root;
  spec.op = parse_op(op);
  spec.dtype = parse_dtype(dtype);
  spec.shape = {count};
  spec.layout = layout;
  spec.compression = value_named(collective::kCompressionNames, compress, "compress '",
                                 "' is not one of bf16, int8, none");
  const ImportedTensor given = import_numbers(array);
  if (output.is_none()) {
    wire::TensorHead head = given.head();
    head.framework = wire::Framework::numpy;
    const std::size_t members = self.peer().view().participants();  // none: start() refuses it
    const auto passage = spec.passage(std::max<std::size_t>(1, members));
    const std::uint64_t bytes =
        collective::output_bytes(passage, static_cast<std::uint32_t>(rank(self).value_or(0)));
    head.shape = {static_cast<std::int64_t>(bytes / passage.item_size)};
    const MutableBuffer result = self.context().pool().allocate(bytes);
    auto decode = [head, result](const wire::Payload&) {
      return export_tensor(result, head, ArrayKind::numpy);  // no other code has the memory
    };
    return start(self, name, std::move(spec), given, result, std::move(decode), retry);
  }
  const ImportedTensor place = import_numbers(output);
  if (place.tensor.read_only || !place.tensor.is_contiguous()) {
    throw Exception(ErrorCode::invalid_argument, "the output must be writable and contiguous");
  }
  auto decode = [](const wire::Payload&) { return nb::none(); };
  return start(self, name, std::move(spec), given, place.memory(), decode, retry);
}

// The fast path of most calls: one array of numpy, torch or JAX, and at most one for the result.
// None: another case.
nb::object all_reduce(const PyGroup& self, const std::string& name, const std::string& op,
                      nb::handle array, nb::handle output, bool retry) {
  const std::optional<ImportedTensor> given = import_plain(array);
  if (!given) return nb::none();
  collective::OpSpec spec;
  spec.op = parse_op(op);
  spec.dtype = given->tensor.dtype;
  spec.shape = {static_cast<std::int64_t>(given->bytes() / given->item_size())};
  // In the form of moolink.data.trees.layout(): other members may have used that path.
  spec.layout = "data: " + tensor::layout_text(spec.dtype, given->tensor.shape);
  if (output.is_none()) {
    const MutableBuffer result = self.context().pool().allocate(given->bytes());
    auto decode = [head = given->head(), result](const wire::Payload&) {
      if (head.device) {
        return export_to_device(result.span(), head, ArrayKind::same, *head.device);
      }
      return export_tensor(result, head, array_kind(head, ArrayKind::same));
    };
    return start(self, name, std::move(spec), *given, result, std::move(decode), retry);
  }
  if (retry) return nb::none();  // a retry needs the unchanged input
  const std::optional<ImportedTensor> place = import_plain(output);
  if (!place || !may_hold_result(*place, *given)) return nb::none();
  auto decode = [kept = Reference(nb::borrow(output))](const wire::Payload&) {
    return kept.borrow();
  };
  return start(self, name, std::move(spec), *given, place->memory(), std::move(decode), retry);
}

void check_reduction(const std::string& op, const std::string& dtype) {
  if (collective::is_supported(parse_dtype(dtype), parse_op(op))) return;
  throw Exception(ErrorCode::invalid_argument, op + " of " + dtype + " is not defined");
}

nb::object all_reduce_value(const PyGroup& self, const std::string& name, nb::handle value,
                            nb::callable op, bool retry) {
  Allocator& pool = self.context().pool();
  wire::Payload payload = encode_value(value, self.options(), pool);
  auto combine = [operation = Reference(std::move(op)), options = self.options(),
                  name](const std::vector<wire::Payload>& values) {
    return fold(values, operation.borrow(), options, name);
  };
  auto future = without_gil([&] {
    return self.peer().all_reduce_value(name, std::move(payload), std::move(combine), retry);
  });
  auto decode = [options = self.options(), &pool](const wire::Payload& result) {
    return decode_value(wire::private_copy(result, pool), options);
  };
  return new_object<PyFuture>(std::move(future), std::move(decode),
                              Subject{"all_reduce", name, {}});
}

constexpr const char* kCollectiveDoc =
    R"(Starts a collective of numbers; returns its Future.

Args:
    name: tells operations apart; the n-th start with a name meets the others' n-th start.
    kind: "all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter" or
        "barrier".
    root: the rank of the root; unused by kinds that have none.
    op: "sum", "mean", "min", "max", "prod", "and", "or" or "xor"; unused by kinds that reduce
        nothing.
    dtype: numpy's name of the elements' type.
    layout: a text that must be the same at all members.
    count: elements of a block.
    array: this member's input. An input of 64 KB or more is read until the future is done.
    output: a writable array without gaps for the result; the future's result is then None.
        None: the future's result is a new flat array.
    retry: whether the operation starts again when the group changes.
    compress: "none", "bf16" or "int8".

Raises:
    moolink.Closed: the group is closed, or this peer is in no view.
    moolink.GroupChanged: the view has changed since the last update().
    ValueError: an argument is none of the above, or sizes do not fit.
    TypeError: `array` or `output` is not an array of numbers in host memory.)";

void bind_membership(nb::class_<PyGroup>& bound) {
  const nb::call_guard<GilRelease> unlocked;
  bound.def("update", &update, "Adopts the newest view; returns whether it has changed.")
      .def("is_outdated", &is_outdated, "Returns whether update() would return True, or raise.")
      .def("wait_for_members", &wait_for_members, nb::arg("count"), nb::arg("timeout").none(),
           "Waits until update() would show `count` members or raise; returns False after "
           "`timeout` seconds.")
      .def("members", &members,
           "Returns the names of the members by rank, as of the last update().")
      .def("name_for_calls", forward<PyGroup>(&runtime::GroupPeer::name_for_calls),
           nb::arg("member"), unlocked,
           "Returns the name by which calls reach that member, not a holder of the group's key "
           "that has taken its name.")
      .def(
          "participants", [](const PyGroup& self) { return self.peer().view().participants(); },
          "Returns the number of members that are not observers; their ranks are below it.")
      .def("rank", &rank, "Returns this peer's rank; None while it is in no view.")
      .def(
          "epoch", [](const PyGroup& self) { return self.peer().view().epoch; },
          "Returns the number of the view; 0: there is none.")
      .def(
          "active", [](const PyGroup& self) { return !self.peer().view().empty(); },
          "Whether there is a view.")
      .def("waiting_for", forward<PyGroup>(&runtime::GroupPeer::waiting_for), unlocked,
           "Returns a sentence on the cause of the group's wait; \"\": it does not wait.")
      .def(
          "set_timeout",
          [](const PyGroup& self, double seconds) {
            self.peer().set_timeout(to_duration(seconds));
          },
          nb::arg("seconds"), unlocked,
          "Sets for how many seconds, at least 1, this peer may be silent before it is evicted.")
      .def("set_sort_order", forward<PyGroup>(&runtime::GroupPeer::set_sort_order),
           nb::arg("order"), unlocked, "Sets this peer's place among the ranks: lower comes first.")
      .def("set_broker_name", forward<PyGroup>(&runtime::GroupPeer::set_broker_name),
           nb::arg("name"), unlocked, "Sets the name of the group's broker.")
      .def("closed", &closed, unlocked, "Whether the group was closed here.")
      .def("close", &PyGroup::close, "Leaves the group.")
      .def("program_key", &PyGroup::program_key,
           "Returns the name by which compiled programs of JAX find this group.");
}

}  // namespace

void bind_group(nb::module_& m) {
  nb::class_<PyGroup> bound(m, "GroupCore", "The base of moolink.Group.");
  bound.def(nb::init<const PyRpc&, const std::string&>(), nb::arg("rpc"), nb::arg("name"));
  bind_membership(bound);
  bound
      .def("collective", &collective_of, nb::arg("name"), nb::arg("kind"), nb::arg("root"),
           nb::arg("op"), nb::arg("dtype"), nb::arg("layout"), nb::arg("count"), nb::arg("array"),
           nb::arg("output").none(), nb::arg("retry"), nb::arg("compress") = "none", kCollectiveDoc,
           nb::sig("def collective(self, name: str, kind: str, root: int, op: str, dtype: str, "
                   "layout: str, count: int, array: numpy.typing.NDArray[typing.Any], output: "
                   "numpy.typing.NDArray[typing.Any] | None, retry: bool, compress: str = 'none') "
                   "-> Future"))
      .def("all_reduce", &all_reduce, nb::arg("name"), nb::arg("op"), nb::arg("array"),
           nb::arg("output").none(), nb::arg("retry"),
           "Reduces one array of numpy, torch or JAX; returns the Future of an array of the same "
           "kind, or of `output`, which then holds the result. Returns None, and starts nothing, "
           "if the arguments need collective().",
           nb::sig("def all_reduce(self, name: str, op: str, array: typing.Any, output: "
                   "typing.Any, retry: bool) -> Future | None"))
      .def_static("check_reduction", &check_reduction, nb::arg("op"), nb::arg("dtype"),
                  "Raises ValueError unless elements of this dtype can be reduced by `op`.")
      .def(
          "memory",
          [](const PyGroup& self, std::size_t bytes) {
            return export_bytes(self.context().pool().allocate(bytes));
          },
          nb::arg("bytes"),
          "Returns a new array of `bytes` bytes, in memory that moolink reuses later.",
          nb::sig("def memory(self, bytes: int) -> numpy.typing.NDArray[numpy.uint8]"))
      .def(
          "all_reduce_value", &all_reduce_value, nb::arg("name"), nb::arg("value"), nb::arg("op"),
          nb::arg("retry"),
          "Reduces any values by `op(a, b)`, in the order of the ranks; returns a Future.",
          nb::sig("def all_reduce_value(self, name: str, value: typing.Any, op: "
                  "typing.Callable[[typing.Any, typing.Any], typing.Any], retry: bool) -> Future"));
}

}  // namespace moolink::bind
