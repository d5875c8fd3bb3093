#include "bind/completions.h"

#include <utility>

#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/future.h"
#include "bind/gil.h"
#include "bind/stream.h"

namespace moolink::bind {

PyCompletions::PyCompletions() : completions_(runtime::Completions::create(default_context())) {}

std::uint64_t PyCompletions::watch(runtime::Awaitable& awaitable, nb::object token) {
  const std::uint64_t number = ++last_;
  tokens_.emplace(number, Reference(std::move(token)));
  await_engine(awaitable.context());
  awaitable.notify(completions_, number);
  return number;
}

void PyCompletions::forget(runtime::Awaitable& awaitable, std::uint64_t number) {
  if (tokens_.erase(number) == 0) return;
  await_engine(awaitable.context());
  awaitable.forget(completions_, number);
}

nb::list PyCompletions::take() {
  nb::list ready;
  for (const std::uint64_t number : completions_->take()) {
    const auto token = tokens_.extract(number);
    if (!token.empty()) ready.append(token.mapped().borrow());
  }
  return ready;
}

void bind_completions(nb::module_& m) {
  nb::class_<PyCompletions>(m, "Completions",
                            "What has become ready, for an event loop that watches fileno().")
      .def(nb::init<>())
      .def("fileno", &PyCompletions::fileno, "Readable while tokens wait.")
      .def(
          "watch",
          [](PyCompletions& self, PyFuture& future, nb::object token) {
            return self.watch(*future.future(), std::move(token));
          },
          nb::arg("awaitable"), nb::arg("token"),
          "Adds `token` to those that take() returns once the future has ended, or the stream has "
          "an item or has ended. Returns the number by which forget() knows it.")
      .def(
          "watch",
          [](PyCompletions& self, PyStream& stream, nb::object token) {
            return self.watch(*stream.stream(), std::move(token));
          },
          nb::arg("awaitable"), nb::arg("token"))
      .def(
          "forget",
          [](PyCompletions& self, PyFuture& future, std::uint64_t number) {
            self.forget(*future.future(), number);
          },
          nb::arg("awaitable"), nb::arg("number"), "Ends a watch.")
      .def(
          "forget",
          [](PyCompletions& self, PyStream& stream, std::uint64_t number) {
            self.forget(*stream.stream(), number);
          },
          nb::arg("awaitable"), nb::arg("number"))
      .def("take", &PyCompletions::take, "The tokens of what has become ready.",
           nb::sig("def take(self) -> list[typing.Any]"));
}

}  // namespace moolink::bind
