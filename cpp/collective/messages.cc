#include "collective/messages.h"

#include <algorithm>

#include "base/error.h"

namespace moolink::collective {
std::uint64_t OpSpec::byte_size() const {
  const auto bytes = tensor::byte_size(tensor::item_size(dtype), shape);
  if (bytes) return *bytes;
  throw Exception(ErrorCode::invalid_argument,
                  "a tensor of shape " + tensor::shape_text(shape) +
                      " cannot be reduced: a dimension is negative or the size overflows");
}

bool OpSpec::contributes(std::uint32_t rank) const {
  return contributors.empty() || std::binary_search(contributors.begin(), contributors.end(), rank);
}

std::string OpSpec::text() const {
  std::string text = kind == Kind::all_reduce ? op_name(op) : kind_name(kind);
  if (kind == Kind::reduce_scatter) text += " (" + op_name(op) + ")";
  if (has_root(kind)) text += " with root " + std::to_string(root);
  text += " of " + std::string(tensor::dtype_name(dtype)) + " " + tensor::shape_text(shape);
  if (!layout.empty()) text += " of " + layout;
  if (divisor != 1) text += " divided by " + std::to_string(divisor);
  if (compression != Compression::none) {
    text += std::string(" sent as ") + kCompressionNames[compression];
  }
  for (std::size_t i = 0; i < contributors.size(); ++i) {
    text += (i == 0 ? " from ranks " : ", ") + std::to_string(contributors[i]);
  }
  return text;
}

}  // namespace moolink::collective
