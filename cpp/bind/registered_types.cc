#include "bind/registered_types.h"

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/enum_names.h"
#include "bind/errors.h"

namespace moolink::bind {
namespace {

// Types are registered at import and never forgotten, so that a running walk may keep pointers.
struct Registry {
  std::vector<std::unique_ptr<RegisteredType>> all;
  std::unordered_map<PyTypeObject*, const RegisteredType*> by_type;
  std::map<std::string, const RegisteredType*, std::less<>> by_name;
  // Called with an unknown type, or name; returns whether it registered one.
  PyObject* late = nullptr;
};

Registry& registry() {
  static auto& instance = *new Registry();  // outlives the interpreter's objects on purpose
  return instance;
}

// Whether anything was registered meanwhile. moolink.data.values registers the types of the
// standard library and of frameworks; it is imported when the first of them is met.
bool register_late(nb::handle what) {
  Registry& types = registry();
  const std::size_t before = types.all.size();
  if (types.late == nullptr) nb::module_::import_("moolink.data.values");
  if (types.late == nullptr) return types.all.size() != before;
  return nb::cast<bool>(nb::handle(types.late)(what)) || types.all.size() != before;
}

void register_type(nb::handle type, const std::string& name, const std::string& form,
                   const std::vector<std::string>& fields, nb::object to_state,
                   nb::object from_state) {
  auto entry = std::make_unique<RegisteredType>();
  entry->head = {name, fields};
  entry->form = value_named(
      enum_names<TypeForm::converted>("dataclass", "namedtuple", "enum", "flags", "converted"),
      form, "unknown form of a type: ");
  entry->type = nb::borrow(type);
  for (const std::string& field : fields) {
    entry->field_names.push_back(interned(field.c_str()));
  }
  entry->to_state = std::move(to_state);
  entry->from_state = std::move(from_state);
  // A redefined class (a notebook's cell) replaces the older one of its name.
  registry().by_type[reinterpret_cast<PyTypeObject*>(type.ptr())] = entry.get();
  registry().by_name[name] = entry.get();
  registry().all.push_back(std::move(entry));
}

}  // namespace

const RegisteredType* find_registered(PyTypeObject* type) {
  const auto& types = registry().by_type;
  const auto found = types.find(type);
  return found == types.end() ? nullptr : found->second;
}

const RegisteredType* find_registered_late(PyTypeObject* type) {
  if (const RegisteredType* found = find_registered(type)) return found;
  return register_late(reinterpret_cast<PyObject*>(type)) ? find_registered(type) : nullptr;
}

const RegisteredType* find_registered_late(std::string_view name) {
  const auto& names = registry().by_name;
  if (const auto found = names.find(name); found != names.end()) return found->second;
  // The name may be anything: it comes from a peer.
  if (!register_late(text(name))) return nullptr;
  const auto found = names.find(name);
  return found == names.end() ? nullptr : found->second;
}

void bind_registered_types(nb::module_& m) {
  m.def("register_type", &register_type, nb::arg("type"), nb::arg("name"), nb::arg("form"),
        nb::arg("fields"), nb::arg("to_state").none(), nb::arg("from_state").none(),
        "Registers a type of values, see moolink.register. `form`: \"dataclass\", \"namedtuple\", "
        "\"enum\", \"flags\" or, with `to_state` and `from_state`, \"converted\".");
  m.def(
      "set_late_registration", [](nb::object late) { registry().late = late.release().ptr(); },
      nb::arg("late"),
      "Sets the function that is called with a type, or a peer's name for a type, that is not "
      "registered. It returns whether it has registered the type.");
}

}  // namespace moolink::bind
