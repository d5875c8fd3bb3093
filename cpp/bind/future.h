#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

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
  // The value of a future that is done, decoded once; or raises its error.
  nb::object value();

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  nb::object error();
  nb::object decode();
  nb::object decode_once();
  void wait_for_decoder();

  std::shared_ptr<runtime::Future> future_;
  std::shared_ptr<const Decode> decode_;
  Subject subject_;
  std::shared_ptr<runtime::Future> released_;
  // The GIL guards these members; decoding may release it.
  std::optional<std::thread::id> decoder_;  // the thread that decodes the value now
  bool decoding_in_child_ = false;          // that thread is of a process forked from the call's
  std::shared_ptr<runtime::Future> decoding_ended_;  // null: no other thread waits for it
  bool decoded_ = false;
  nb::object value_;
  nb::object failure_;  // of decoding; its copies are raised (moolink.internal.exceptions)
};

}  // namespace moolink::bind
