#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "bind/reference.h"
#include "runtime/engine/future.h"
#include "wire/payload.h"

namespace moolink::bind {

namespace nb = nanobind;

// The subject of a future, for errors: "call of 'f' at peer 'x'". Composed only on request.
struct Subject {
  const char* what = "";
  std::string name;
  std::string peer;  // empty: no single peer

  std::string text() const;
};

// Python's Future: of a call, or of any operation of the runtime.
class PyFuture {
 public:
  using Decode = std::function<nb::object(const wire::Payload&)>;

  // `decode` may be shared by all futures of one kind. `released`: done when the last reader of the
  // lent memory is gone; null: it lends nothing.
  PyFuture(std::shared_ptr<runtime::Future> future, std::shared_ptr<const Decode> decode,
           Subject subject, std::shared_ptr<runtime::Future> released = nullptr)
      : future_(std::move(future)),
        decode_(std::move(decode)),
        subject_(std::move(subject)),
        released_(std::move(released)) {}
  PyFuture(std::shared_ptr<runtime::Future> future, Decode decode, Subject subject)
      : PyFuture(std::move(future), std::make_shared<const Decode>(std::move(decode)),
                 std::move(subject)) {}

  nb::any result(std::optional<double> timeout);
  bool wait(std::optional<double> timeout);
  bool done() const { return future_->done(); }
  nb::object exception();
  bool cancel();
  nb::object released();
  std::string repr() const;

  const std::shared_ptr<runtime::Future>& future() const { return future_; }
  runtime::Awaitable& awaitable() const { return *future_; }
  // The value or exception of a future that is done; decoded once.
  nb::object value();

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  void decode();
  void decode_once();

  std::shared_ptr<runtime::Future> future_;
  std::shared_ptr<const Decode> decode_;
  Subject subject_;
  std::shared_ptr<runtime::Future> released_;
  std::mutex decoding_;             // taken without the GIL, which decoding may release
  bool decoding_in_child_ = false;  // the lock's holder is a process forked from the call's
  bool decoded_ = false;
  nb::object value_;
  nb::object exception_;
};

}  // namespace moolink::bind
