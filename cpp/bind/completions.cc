#include "bind/completions.h"

#include <utility>

#include "bind/context.h"
#include "bind/future.h"
#include "bind/stream.h"

namespace moolink::bind {

PyCompletions::PyCompletions() : completions_(runtime::Completions::create(default_context())) {}

std::uint64_t PyCompletions::watch(runtime::Awaitable& awaitable, nb::object token) {
  const std::uint64_t number = ++last_;
  tokens_.emplace(number, Reference(std::move(token)));
  awaitable.notify(completions_, number);
  return number;
}

void PyCompletions::forget(runtime::Awaitable& awaitable, std::uint64_t number) {
  if (tokens_.erase(number) != 0) awaitable.forget(completions_, number);
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
      .def("watch", [](PyCompletions& self, PyFuture& future,
                       nb::object token) { return self.watch(*future.future(), std::move(token)); })
      .def("watch", [](PyCompletions& self, PyStream& stream,
                       nb::object token) { return self.watch(*stream.stream(), std::move(token)); })
      .def("forget", [](PyCompletions& self, PyFuture& future,
                        std::uint64_t number) { self.forget(*future.future(), number); })
      .def("forget", [](PyCompletions& self, PyStream& stream,
                        std::uint64_t number) { self.forget(*stream.stream(), number); })
      .def("take", &PyCompletions::take, "The tokens of what has become ready.");
}

}  // namespace moolink::bind
