#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "base/time.h"

namespace moolink::rpc {

// Limit of log lines about unauthenticated peers: some at once and then one a second, so that peers
// that fail thousands of times do not fill a disk. The next line counts the omitted ones.
class LogLimit {
 public:
  // The line to log now; none: it is omitted.
  std::optional<std::string> line(Time now, std::string text) {
    if (now - last_ >= kEvery) {
      const auto earned = static_cast<std::size_t>((now - last_) / kEvery);
      lines_ = std::min(lines_ + earned, kAtOnce);
      last_ = now;
    }
    if (lines_ == 0) {
      ++left_out_;
      return std::nullopt;
    }
    --lines_;
    if (const std::size_t others = std::exchange(left_out_, 0); others > 0) {
      text += " (" + std::to_string(others) + " connections before it are not logged)";
    }
    return text;
  }

 private:
  static constexpr std::size_t kAtOnce = 16;
  static constexpr Duration kEvery = seconds(1);

  std::size_t lines_ = kAtOnce;
  std::size_t left_out_ = 0;
  Time last_{};
};

}  // namespace moolink::rpc
