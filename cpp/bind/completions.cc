#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/future.h"
#include "bind/gil.h"
#include "bind/reference.h"
#include "bind/stream.h"
#include "runtime/engine/awaitable.h"
#include "runtime/engine/completions.h"

namespace moolink::bind {
namespace {

// Python's side of runtime::Completions: its tokens are Python objects.
class PyCompletions {
 public:
  PyCompletions() : completions_(runtime::Completions::create(default_context())) {}
  ~PyCompletions() { completions_->close(); }
  PyCompletions(const PyCompletions&) = delete;
  PyCompletions& operator=(const PyCompletions&) = delete;

  int fileno() const { return completions_->descriptor(); }

  // Returns the number for forget().
  template <class PyAwaitable>
  std::uint64_t watch(PyAwaitable& of, nb::object token) {
    runtime::Awaitable& awaitable = of.awaitable();
    const std::uint64_t number = ++last_;
    tokens_.emplace(number, Reference(std::move(token)));
    await_engine(awaitable.context());
    awaitable.notify(completions_, number);
    return number;
  }

  template <class PyAwaitable>
  void forget(PyAwaitable& of, std::uint64_t number) {
    runtime::Awaitable& awaitable = of.awaitable();
    if (tokens_.erase(number) == 0) return;
    await_engine(awaitable.context());
    awaitable.forget(completions_, number);
  }

  nb::typed<nb::list, nb::any> take() {
    nb::list ready;
    for (const std::uint64_t number : completions_->take()) {
      const auto token = tokens_.extract(number);
      if (!token.empty()) ready.append(token.mapped().borrow());
    }
    return ready;
  }

 private:
  std::shared_ptr<runtime::Completions> completions_;
  std::uint64_t last_ = 0;
  std::unordered_map<std::uint64_t, Reference> tokens_;  // guarded by the GIL
};

}  // namespace

void bind_completions(nb::module_& m) {
  nb::class_<PyCompletions>(
      m, "Completions",
      "The futures and streams that have become ready, for an event loop that watches fileno().")
      .def(nb::init<>())
      .def("fileno", &PyCompletions::fileno,
           "Returns a descriptor that is readable while tokens wait for take().")
      .def("watch", &PyCompletions::watch<PyFuture>, nb::arg("awaitable"), nb::arg("token"),
           "Makes take() return `token` once the future has ended, or the stream has an item or "
           "has ended. Returns the number of the watch, for forget().")
      .def("watch", &PyCompletions::watch<PyStream>, nb::arg("awaitable"), nb::arg("token"))
      .def("forget", &PyCompletions::forget<PyFuture>, nb::arg("awaitable"), nb::arg("number"),
           "Ends a watch.")
      .def("forget", &PyCompletions::forget<PyStream>, nb::arg("awaitable"), nb::arg("number"))
      .def("take", &PyCompletions::take,
           "Returns the tokens of futures and streams that have become ready, each once.");
}

}  // namespace moolink::bind
