#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>

#include "runtime/peer/loans.h"
#include "runtime/peer/responder.h"

namespace moolink::bind {

namespace nb = nanobind;

// Python's Lent: a value whose arrays are lent to its receivers.
class PyLent {
 public:
  PyLent(nb::object value, std::optional<nb::callable> on_release)
      : value_(std::move(value)),
        on_release_(on_release ? nb::object(std::move(*on_release)) : nb::object(nb::none())) {}

  // Null: the object is not a Lent.
  static const PyLent* of(nb::handle object);

  nb::handle value() const { return value_; }
  // Kept by every reader of one message's lent memory; null: no callback was given.
  std::shared_ptr<const void> release(std::shared_ptr<runtime::Context> context) const;

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  nb::object value_;
  nb::object on_release_;
};

// The lender of a message's arrays; without one, a value that lends is refused.
struct Lender {
  std::shared_ptr<runtime::Context> context;
  // Done when the last reader of the message's lent memory is gone; null: it lends nothing.
  std::shared_ptr<runtime::Future> released = nullptr;
  // None: the message has several receivers.
  std::optional<runtime::Recipient> recipient = std::nullopt;
};

}  // namespace moolink::bind
