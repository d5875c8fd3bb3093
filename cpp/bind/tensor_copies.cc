// Avoidable copies: counted, and each kind logged once.

#include <string>

#include "bind/context.h"
#include "bind/tensor.h"

namespace moolink::bind {
namespace {

struct Explanation {
  const char* name;  // in stats()
  const char* text;
};

// In the order of CopyReason.
constexpr std::array<Explanation, kCopyReasons - 1> kExplanations = {{
    {"gaps",
     "an array with gaps, or not in row-major order, is gathered element by element: give a "
     "contiguous one"},
    {"byte_order", "a big-endian array is converted: give one of this machine's byte order"},
    {"lazy_view", "a conjugated or negated view is computed first: call resolve_conj() once"},
    {"several_parts", "a jax.Array sharded over several devices is put together first"},
    {"lent",
     "a lent array becomes a copy, as the arrays of the framework asked for cannot be "
     "read-only: receive it with arrays=\"numpy\""},
    {"alignment", "memory that does not begin at a multiple of 64 bytes is copied"},
}};

}  // namespace

void CopyCounts::add(CopyReason reason, std::size_t bytes) {
  if (reason == CopyReason::none) return;
  std::uint64_t& count = counts_[static_cast<std::size_t>(reason)];
  bytes_ += bytes;
  if (++count != 1) return;
  const Explanation& explanation = kExplanations[static_cast<std::size_t>(reason) - 1];
  const auto context = default_context();
  const auto lock = context->lock();
  context->log(LogLevel::info,
               std::string("copied ") + std::to_string(bytes) + " bytes: " + explanation.text +
                   " (said once; rpc.stats()[\"copies\"][\"" + explanation.name + "\"] counts)");
}

nb::dict CopyCounts::describe() const {
  nb::dict result;
  for (std::size_t i = 0; i < kExplanations.size(); ++i) {
    result[kExplanations[i].name] = counts_[i + 1];
  }
  result["bytes"] = bytes_;
  return result;
}

}  // namespace moolink::bind
