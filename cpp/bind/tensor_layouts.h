#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensor/dtype.h"

namespace moolink::bind {

namespace nb = nanobind;

// The required layouts of the tensors of a list, checked each time: users resize, move and replace
// them.
class TensorLayouts {
 public:
  using Layout = std::pair<std::vector<std::int64_t>, std::string>;  // shape, dtype

  explicit TensorLayouts(const std::vector<Layout>& layouts);

  // The addresses of the elements, 0 for None; empty unless all have the required layout, in host
  // memory and without gaps.
  std::optional<std::vector<std::uintptr_t>> addresses(const nb::list& tensors) const;

 private:
  struct Wanted {
    std::vector<std::int64_t> shape;
    tensor::DType dtype;
  };
  std::vector<Wanted> wanted_;
};

}  // namespace moolink::bind
