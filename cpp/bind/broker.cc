#include "bind/broker.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/context.h"
#include "bind/gil.h"
#include "bind/rpc.h"
#include "runtime/broker_peer.h"

namespace moolink::bind {
namespace {

// Python's Broker.
class PyBroker {
 public:
  PyBroker(nb::object rpc, bool first) : owns_rpc_(rpc.is_none()) {
    std::shared_ptr<runtime::RpcPeer> peer;
    if (owns_rpc_) {
      runtime::RpcOptions options;
      options.name = "broker";
      peer = runtime::RpcPeer::create(default_context(), std::move(options));
      close_at_exit(peer);
    } else {
      peer = nb::cast<PyRpc&>(rpc).peer();
    }
    group::BrokerConfig config;
    if (first) config.gather = Duration::zero();
    broker_ = std::make_unique<runtime::BrokerPeer>(std::move(peer), config);
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

constexpr const char* kBrokerDoc =
    R"(Where the peers of groups meet: it alone numbers the views of a group.

It is outside of the data path and keeps nothing that its members cannot tell it again: training
goes on while it is away. Needs no pumping. It is a context manager that closes itself.

Args:
    rpc: the peer to be a broker on; default: a new one, called "broker".
    first: whether it is known that no members of an earlier broker can be around; then the first
        group forms at once instead of after a second of listening.)";

}  // namespace

void bind_broker(nb::module_& m) {
  nb::class_<PyBroker>(m, "Broker", kBrokerDoc)
      .def(nb::init<nb::object, bool>(), nb::arg("rpc") = nb::none(), nb::kw_only(),
           nb::arg("first") = false)
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
