#include "bind/completions.h"

#include <utility>

#include "bind/context.h"
#include "bind/future.h"
#include "bind/stream.h"

namespace moolink::bind {

PyCompletions::PyCompletions() : completions_(runtime::Completions::create(default_context())) {}

void PyCompletions::watch(runtime::Awaitable& awaitable, nb::object token) {
  const std::uint64_t number = ++last_;
  tokens_.emplace(number, Reference(std::move(token)));
  awaitable.notify(completions_, number);
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
                       nb::object token) { self.watch(*future.future(), std::move(token)); })
      .def("watch", [](PyCompletions& self, PyStream& stream,
                       nb::object token) { self.watch(*stream.stream(), std::move(token)); })
      .def("take", &PyCompletions::take, "The tokens of what has become ready.");
}

}  // namespace moolink::bind
