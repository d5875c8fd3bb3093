#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bind/value.h"
#include "runtime/peer/responder.h"

namespace moolink::bind {

namespace nb = nanobind;

// The caller's error for the exception that the handler raised; clears it. Needs the GIL.
Error to_remote_error(nb::python_error& raised, const std::string& function);

// Sends it; after an earlier reply it is only logged. Needs the GIL.
void send_raised(runtime::Responder& responder, nb::python_error& raised);

// ... for a value without an encoding: too deep, too large.
Error unsendable(const runtime::Responder& responder, const std::string& what,
                 const std::string& why);

// Encodes and sends; sends an exception of the encoding instead. Needs the GIL.
void send_value(runtime::Responder& responder, nb::handle value, const ValueOptions& options);
// Encodes and sends an item of a stream; throws the exceptions of the encoding. Needs the GIL.
void send_item(runtime::Responder& responder, nb::handle value, const ValueOptions& options);

// Python's RpcDeferredReturn: the reply of a define_deferred handler.
class PyDeferred {
 public:
  using Callback = nb::typed<nb::callable, nb::object()>;

  PyDeferred(std::shared_ptr<runtime::Responder> responder,
             std::shared_ptr<const ValueOptions> options)
      : responder_(std::move(responder)), options_(std::move(options)) {}

  void reply(nb::object value);
  void error(nb::handle exception);
  void refuse(const std::string& reason);
  void reject(const std::string& reason);
  void add_cancel_callback(Callback callback);
  bool cancelled() const { return responder_->cancelled(); }
  const std::string& caller_group() const { return responder_->caller_group(); }
  std::string repr() const;

  int traverse(visitproc visit, void* arg) const;
  void clear() { const auto dropped = std::exchange(cancel_callbacks_, nullptr); }

 protected:
  using Callbacks = std::vector<nb::object>;

  void require_unsent() const;
  void finish(rpc::Reply reply);

  std::shared_ptr<runtime::Responder> responder_;
  std::shared_ptr<const ValueOptions> options_;
  std::shared_ptr<Callbacks> cancel_callbacks_;  // null: none, or a reply was sent
};

// ... of a define_streamed handler: items before the reply.
class PyStreamReturn : public PyDeferred {
 public:
  using PyDeferred::PyDeferred;

  bool item(nb::object value);
  void when_room(Callback callback);
};

}  // namespace moolink::bind
