#include "bind/broker.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/gil.h"
#include "bind/rpc.h"
#include "runtime/broker_peer.h"

namespace moolink::bind {
namespace {

// Python's BrokerCore, on which moolink.Broker is built.
class PyBroker {
 public:
  // `owns`: the peer is closed with the broker.
  PyBroker(const PyRpc& rpc, bool first, bool owns) : owns_rpc_(owns) {
    group::BrokerConfig config;
    if (first) config.gather = Duration::zero();
    broker_ = std::make_unique<runtime::BrokerPeer>(rpc.peer(), config);
  }
  ~PyBroker() { close(); }
  PyBroker(const PyBroker&) = delete;
  PyBroker& operator=(const PyBroker&) = delete;

  void set_name(const std::string& name) { broker_->rpc()->set_name(name); }
  std::vector<std::string> listen(const std::string& address,
                                  const std::optional<std::string>& advertise) {
    const GilRelease unlocked;
    return broker_->rpc()->listen(address, advertise.value_or(""));
  }
  std::vector<std::string> groups() { return broker_->groups(); }
  std::vector<std::string> members(const std::string& group) {
    std::vector<std::string> names;
    for (const group::MemberInfo& member : broker_->view(group).members) {
      names.push_back(member.name);
    }
    return names;
  }
  void close() {
    const GilRelease unlocked;
    broker_->close();
    if (owns_rpc_) broker_->rpc()->close();
  }

 private:
  const bool owns_rpc_;
  std::unique_ptr<runtime::BrokerPeer> broker_;
};

}  // namespace

void bind_broker(nb::module_& m) {
  nb::class_<PyBroker>(m, "BrokerCore")
      .def(nb::init<const PyRpc&, bool, bool>(), nb::arg("rpc"), nb::kw_only(), nb::arg("first"),
           nb::arg("owns"))
      .def("set_name", &PyBroker::set_name, nb::arg("name"),
           "Names the broker's peer, before the first connection.")
      .def("listen", &PyBroker::listen, nb::arg("address"), nb::arg("advertise") = nb::none(),
           "Listens as Rpc.listen does; returns the addresses at which peers can connect.")
      .def(
          "update", [](PyBroker&) {}, "Kept for moolib's scripts; nothing needs to be pumped.")
      .def("groups", &PyBroker::groups, "Names of the groups it knows.")
      .def("members", &PyBroker::members, nb::arg("group"),
           "Names of a group's members in the order of their ranks; empty for an unknown group.")
      .def("close", &PyBroker::close, "Stops being a broker; groups go on as they are.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", [](PyBroker& self, const nb::args&) { self.close(); });
}

}  // namespace moolink::bind
