#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>

#include "bind/value.h"
#include "runtime/engine/stream.h"
#include "runtime/peer/responder.h"

namespace moolink::bind {

namespace nb = nanobind;

// Python's Stream: the items of a streamed call.
class PyStream {
 public:
  PyStream(std::shared_ptr<runtime::Stream> stream, std::shared_ptr<const ValueOptions> options)
      : stream_(std::move(stream)), options_(std::move(options)) {}
  ~PyStream() { close(); }
  PyStream(const PyStream&) = delete;
  PyStream& operator=(const PyStream&) = delete;

  // The next item; raises StopIteration after the last one, and after it has raised an error.
  nb::object next();
  // The next item and true, or None and false if it has not arrived yet; raises StopAsyncIteration
  // after the last one.
  nb::tuple poll();
  void close();

  runtime::Awaitable& awaitable() const { return *stream_; }

 private:
  std::optional<nb::object> take();
  void end(PyObject* stop);

  std::shared_ptr<runtime::Stream> stream_;
  std::shared_ptr<const ValueOptions> options_;
  bool raised_ = false;  // the final error was raised; guarded by the GIL
};

// Sends the iterator's items as fast as the caller takes them, and then replies. Needs the GIL; no
// thread waits between items.
void send_stream(const std::shared_ptr<runtime::Responder>& responder, nb::object iterator,
                 const std::shared_ptr<const ValueOptions>& options);

}  // namespace moolink::bind
