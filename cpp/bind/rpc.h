#pragma once

#include <nanobind/nanobind.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/future.h"
#include "bind/reference.h"
#include "bind/value.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::bind {

namespace nb = nanobind;

// Python's RpcCore, on which moolink.Rpc is built.
class PyRpc {
 public:
  // A key: its 32 bytes, and its group or "".
  using PyKey = std::pair<nb::bytes, std::string>;

  PyRpc(std::optional<std::string> name, std::string_view arrays, std::string_view device,
        bool allow_pickle, std::optional<std::vector<std::string>> transports, double timeout,
        const std::vector<PyKey>& keys, std::string key_origin);
  ~PyRpc();
  PyRpc(const PyRpc&) = delete;
  PyRpc& operator=(const PyRpc&) = delete;

  std::string get_name() const { return peer_->name(); }
  void set_name(const std::string& name) { peer_->set_name(name); }
  double get_timeout() const { return timeout_; }
  void set_timeout(double seconds);
  void set_transports(const std::vector<std::string>& names);
  std::vector<std::string> listen(const std::string& address,
                                  const std::optional<std::string>& advertise);
  void connect(const std::string& address) { peer_->connect(address); }
  std::vector<std::string> addresses() const { return peer_->addresses(); }
  void close();

  void define(const std::string& name, nb::callable function);
  void define_deferred(const std::string& name, nb::callable function);
  void define_confined(const std::string& name, nb::callable function, const std::string& group);
  void define_streamed(const std::string& name, nb::callable function);
  void undefine(const std::string& name);

  nb::object async(const std::string& peer, const std::string& function, const nb::args& arguments,
                   const nb::kwargs& keywords);
  nb::object async_within(std::optional<double> seconds, const std::string& peer,
                          const std::string& function, const nb::args& arguments);
  nb::object sync(const std::string& peer, const std::string& function, const nb::args& arguments,
                  const nb::kwargs& keywords);
  void async_callback(const std::string& peer, const std::string& function, nb::callable callback,
                      const nb::args& arguments, const nb::kwargs& keywords);
  nb::dict async_many(const std::vector<std::string>& peers, const std::string& function,
                      const nb::args& arguments, const nb::kwargs& keywords);

  nb::object stream(const std::string& peer, const std::string& function, const nb::args& arguments,
                    const nb::kwargs& keywords);

  std::string repr() const;  // without the GIL
  nb::dict stats() const;
  nb::list peers() const;
  nb::dict explain(const std::string& peer) const;
  std::vector<std::string> flight_recorder() const { return peer_->flight_recorder(); }

  const std::shared_ptr<runtime::RpcPeer>& peer() const { return peer_; }
  const ValueOptions& options() const { return *options_; }

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  // Common to every kind of call.
  struct Outgoing {
    wire::Payload payload;
    std::shared_ptr<runtime::Future> released;  // of its lent memory; null: it lends nothing
    Duration timeout;
    std::uint16_t lane;
  };
  // peer: the only receiver.
  Outgoing outgoing(const std::string* peer, const nb::args& arguments,
                    const nb::kwargs& keywords) const;
  nb::object start(const std::string& peer, const std::string& function, Outgoing call) const;
  // Guarded by the GIL. Handlers hold it weakly, so that a peer referenced by its own handlers can
  // be collected.
  using Functions = std::map<std::string, Reference>;

  // Runs a Python function for a call; its exceptions go to the caller.
  using Run = void (*)(const nb::object& function, const runtime::Incoming& call,
                       const std::shared_ptr<const ValueOptions>& options);
  void add_function(const std::string& name, nb::callable function, Run run,
                    const std::string& group = {});
  nb::object future_of(std::shared_ptr<runtime::Future> future, const std::string& peer,
                       const std::string& function,
                       std::shared_ptr<runtime::Future> released) const;

  std::shared_ptr<const ValueOptions> options_;
  std::shared_ptr<const PyFuture::Decode> decode_result_;  // of all its futures
  std::shared_ptr<runtime::RpcPeer> peer_;
  std::shared_ptr<Functions> functions_;
  double timeout_;
};

}  // namespace moolink::bind
