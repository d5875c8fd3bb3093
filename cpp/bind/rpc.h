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
  // Guarded by the GIL. Handlers hold it weakly, so that a peer referenced by its own handlers can
  // be collected.
  using Functions = std::map<std::string, Reference>;

  PyRpc(std::optional<std::string> name, std::string_view arrays, std::string_view device,
        bool allow_pickle, std::optional<std::vector<std::string>> transports, double timeout,
        const std::vector<PyKey>& keys, std::string key_origin);
  ~PyRpc();
  PyRpc(const PyRpc&) = delete;
  PyRpc& operator=(const PyRpc&) = delete;

  double timeout() const { return timeout_; }
  void set_timeout(double seconds);
  void close();

  const std::shared_ptr<runtime::RpcPeer>& peer() const { return peer_; }
  const ValueOptions& options() const { return *options_; }
  const std::shared_ptr<const ValueOptions>& shared_options() const { return options_; }
  const std::shared_ptr<Functions>& functions() const { return functions_; }
  // The future of a call. `released`: of its lent memory; null: it lends nothing.
  nb::object future_of(std::shared_ptr<runtime::Future> call, const std::string& peer,
                       const std::string& function,
                       std::shared_ptr<runtime::Future> released) const;

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  std::shared_ptr<const ValueOptions> options_;
  std::shared_ptr<const PyFuture::Decode> decode_result_;  // of all its futures
  std::shared_ptr<runtime::RpcPeer> peer_;
  std::shared_ptr<Functions> functions_;
  double timeout_;
};

// rpc_functions.cc and rpc_calls.cc: each adds methods to the class.
void bind_functions(nb::class_<PyRpc>& rpc);
void bind_calls(nb::class_<PyRpc>& rpc);

}  // namespace moolink::bind
