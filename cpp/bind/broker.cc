#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "bind/bindings.h"
#include "bind/describe.h"
#include "bind/gil.h"
#include "bind/rpc.h"
#include "runtime/group/broker_peer.h"

namespace moolink::bind {
namespace {

// Python's BrokerCore, on which moolink.Broker is built.
class PyBroker : public runtime::BrokerPeer {
 public:
  // `owns`: the peer is closed with the broker.
  PyBroker(const PyRpc& rpc, bool first, bool owns)
      : BrokerPeer(rpc.peer(), config_of(first)), owns_rpc_(owns) {}
  ~PyBroker() override { close_without_gil(); }

  void close_without_gil() {
    const GilRelease unlocked;
    BrokerPeer::close();
    if (owns_rpc_) rpc()->close();
  }

  // Without the GIL:
  void set_name(const std::string& name) { rpc()->set_name(name); }
  std::vector<std::string> listen(const std::string& address,
                                  const std::optional<std::string>& advertise) {
    return rpc()->listen(address, advertise.value_or(""));
  }
  std::vector<std::string> members(const std::string& group) {
    std::vector<std::string> names;
    for (const group::MemberInfo& member : view(group).members) names.push_back(member.name);
    return names;
  }
  std::string repr() {
    try {
      std::string text = "<moolink.Broker '" + rpc()->name() + "'";
      if (closed()) return text + ", closed>";
      const std::size_t count = groups().size();
      return text + places_text(rpc()->addresses()) + ", " + std::to_string(count) +
             (count == 1 ? " group>" : " groups>");
    } catch (const Exception&) {  // this process is a forked child
      return "<moolink.Broker of the parent process>";
    }
  }

 private:
  static group::BrokerConfig config_of(bool first) {
    group::BrokerConfig config;
    if (first) config.gather = Duration::zero();
    return config;
  }

  const bool owns_rpc_;
};

}  // namespace

void bind_broker(nb::module_& m) {
  nb::class_<PyBroker> broker(m, "BrokerCore", "The base of moolink.Broker.");
  broker
      .def(nb::init<const PyRpc&, bool, bool>(), nb::arg("rpc"), nb::kw_only(), nb::arg("first"),
           nb::arg("owns"))
      .def("set_name", &PyBroker::set_name, nb::arg("name"), nb::call_guard<GilRelease>(),
           "Names the broker's peer, before the first connection.")
      .def("listen", &PyBroker::listen, nb::arg("address"), nb::arg("advertise") = nb::none(),
           nb::call_guard<GilRelease>(),
           "Listens as Rpc.listen does; returns the addresses at which peers can connect.")
      .def("groups", &PyBroker::groups, nb::call_guard<GilRelease>(),
           "Returns the names of the groups that it knows.")
      .def("members", &PyBroker::members, nb::arg("group"), nb::call_guard<GilRelease>(),
           "Returns the names of a group's members in the order of their ranks; an unknown group "
           "has none.")
      .def("close", &PyBroker::close_without_gil,
           "Stops being a broker; groups continue as they are.")
      .def("__repr__", &PyBroker::repr, nb::call_guard<GilRelease>());
  def_context_manager(broker);
}

}  // namespace moolink::bind
