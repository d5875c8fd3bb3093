#include "bind/group.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bind/context.h"
#include "bind/deferred.h"
#include "bind/future.h"
#include "bind/gil.h"
#include "bind/reference.h"

namespace moolink::bind {
namespace {

collective::ReduceOp parse_op(const std::string& name) {
  for (const auto op : {collective::ReduceOp::sum, collective::ReduceOp::mean,
                        collective::ReduceOp::min, collective::ReduceOp::max}) {
    if (collective::op_name(op) == name) return op;
  }
  throw Exception(ErrorCode::invalid_argument,
                  "op '" + name + "' is not one of sum, mean, min, max, nor a callable");
}

tensor::DType parse_dtype(const std::string& name) {
  if (const auto dtype = tensor::dtype_from_name(name)) return *dtype;
  throw Exception(ErrorCode::invalid_argument, "elements of type " + name + " cannot be reduced");
}

// Combines the members' values with the user's operation, from rank 0 upwards.
std::variant<wire::Payload, Error> fold(const std::vector<wire::Payload>& values,
                                        nb::handle operation, const ValueOptions& options,
                                        const std::string& name) {
  try {
    Allocator& pool = default_context()->pool();
    // An operation may be tried again after a change of the group: its inputs stay as they are.
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
    return Error{ErrorCode::remote,
                 "the result of the operation '" + name + "' cannot travel: " + e.what(),
                 {},
                 name,
                 "TypeError",
                 {},
                 Ran::yes};
  }
}

}  // namespace

PyGroup::PyGroup(const PyRpc& rpc, const std::string& name) : options_(rpc.options()) {
  group_ = std::make_shared<runtime::GroupPeer>(rpc.peer(), name);
}

void PyGroup::close() {
  const GilRelease unlocked;
  group_->close();
}

std::vector<std::string> PyGroup::members() const {
  std::vector<std::string> names;
  for (const group::MemberInfo& member : group_->view().members) names.push_back(member.name);
  return names;
}

std::optional<std::size_t> PyGroup::rank() const {
  return group_->view().rank_of(group_->rpc()->instance());
}

void PyGroup::set_timeout(double seconds) { group_->set_timeout(to_duration(seconds)); }

nb::object PyGroup::all_reduce(const std::string& name, const std::string& op,
                               const std::string& dtype, const std::string& layout,
                               nb::handle array, bool retry) {
  const ImportedTensor input = import_numbers(array);
  collective::OpSpec spec;
  spec.dtype = parse_dtype(dtype);
  spec.op = parse_op(op);
  spec.shape = input.tensor.shape;
  spec.layout = layout;
  Allocator& pool = group_->rpc()->context()->pool();
  const MutableBuffer bytes = pool.allocate(input.bytes());
  copy_elements(input, bytes.data());
  std::shared_ptr<runtime::Future> future;
  {
    const GilRelease unlocked;
    future = group_->all_reduce(name, std::move(spec), bytes, retry);
  }
  wire::TensorHead head = input.head();
  head.framework = wire::Framework::numpy;
  // The result's memory may still be on its way to other members: the user gets their own.
  auto decode = [head, &pool](const wire::Payload& payload) {
    const wire::Payload own = wire::private_copy(payload, pool);
    const Buffer& result = own.parts.front();
    return export_tensor({std::const_pointer_cast<void>(result.owner()),
                          const_cast<std::byte*>(result.data()), result.size()},
                         head, ArrayKind::numpy);
  };
  return nb::cast(
      new PyFuture(std::move(future), std::move(decode), Subject{"all_reduce", name, {}}),
      nb::rv_policy::take_ownership);
}

nb::object PyGroup::all_reduce_value(const std::string& name, nb::handle value, nb::callable op,
                                     bool retry) {
  Allocator& pool = group_->rpc()->context()->pool();
  wire::Payload payload = encode_value(value, options_, pool);
  auto combine = [operation = Reference(std::move(op)), options = options_,
                  name](const std::vector<wire::Payload>& values) {
    return fold(values, operation.borrow(), options, name);
  };
  std::shared_ptr<runtime::Future> future;
  {
    const GilRelease unlocked;
    future = group_->all_reduce_value(name, std::move(payload), std::move(combine), retry);
  }
  auto decode = [options = options_, &pool](const wire::Payload& result) {
    return decode_value(wire::private_copy(result, pool), options);
  };
  return nb::cast(
      new PyFuture(std::move(future), std::move(decode), Subject{"all_reduce", name, {}}),
      nb::rv_policy::take_ownership);
}

void bind_group(nb::module_& m) {
  nb::class_<PyGroup>(m, "GroupCore", "What moolink.Group stands on.")
      .def(nb::init<const PyRpc&, const std::string&>(), nb::arg("rpc"), nb::arg("name"))
      .def("update", &PyGroup::update)  // with the GIL, which guards the view that it changes
      .def("members", &PyGroup::members)
      .def("rank", &PyGroup::rank)
      .def("epoch", &PyGroup::epoch)
      .def("active", &PyGroup::active)
      .def("waiting_for", &PyGroup::waiting_for)
      .def("set_timeout", &PyGroup::set_timeout, nb::arg("seconds"))
      .def("set_sort_order", &PyGroup::set_sort_order, nb::arg("order"))
      .def("set_broker_name", &PyGroup::set_broker_name, nb::arg("name"))
      .def("all_reduce", &PyGroup::all_reduce, nb::arg("name"), nb::arg("op"), nb::arg("dtype"),
           nb::arg("layout"), nb::arg("array"), nb::arg("retry"))
      .def("all_reduce_value", &PyGroup::all_reduce_value, nb::arg("name"), nb::arg("value"),
           nb::arg("op"), nb::arg("retry"))
      .def("close", &PyGroup::close);
}

}  // namespace moolink::bind
