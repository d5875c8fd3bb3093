#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "bind/reference.h"
#include "runtime/engine/awaitable.h"
#include "runtime/engine/completions.h"

namespace moolink::bind {

namespace nb = nanobind;

// Python's side of runtime::Completions: its tokens are Python objects.
class PyCompletions {
 public:
  PyCompletions();
  ~PyCompletions() { completions_->close(); }
  PyCompletions(const PyCompletions&) = delete;
  PyCompletions& operator=(const PyCompletions&) = delete;

  int fileno() const { return completions_->descriptor(); }
  // Returns the number for forget().
  std::uint64_t watch(runtime::Awaitable& awaitable, nb::object token);
  void forget(runtime::Awaitable& awaitable, std::uint64_t number);
  nb::list take();

 private:
  std::shared_ptr<runtime::Completions> completions_;
  std::uint64_t last_ = 0;
  std::unordered_map<std::uint64_t, Reference> tokens_;  // guarded by the GIL
};

}  // namespace moolink::bind
