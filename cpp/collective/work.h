#pragma once

#include <cstddef>
#include <utility>
#include <variant>
#include <vector>

#include "collective/compression.h"
#include "collective/kernels.h"

namespace moolink::collective {

// Arithmetic that a machine requests: pieces in order, on one thread.
struct Work {
  using Piece = std::variant<SumTask, EncodeTask, DecodeTask>;
  std::vector<Piece> pieces;

  Work() = default;
  Work(SumTask task) { pieces.emplace_back(std::move(task)); }     // NOLINT(google-explicit-*)
  Work(DecodeTask task) { pieces.emplace_back(std::move(task)); }  // NOLINT(google-explicit-*)

  // The bytes it writes, from which a runtime estimates its duration.
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const Piece& piece : pieces) {
      sum += std::visit([](const auto& task) { return task.output.size(); }, piece);
    }
    return sum;
  }
};

inline void run(const Work& work) {
  for (const Work::Piece& piece : work.pieces) {
    std::visit([](const auto& task) { run(task); }, piece);
  }
}

}  // namespace moolink::collective
