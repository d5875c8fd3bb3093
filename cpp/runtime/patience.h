#pragma once

#include <algorithm>
#include <cstdint>

namespace moolink::runtime {

// Whether it is worth looking again for a moment before sleeping: what comes within the moment
// saves a sleep and a wake-up, which cost more; a moment in vain costs a processor that others may
// need. After each one in vain twice as many opportunities are passed over.
class Patience {
 public:
  bool is_worth_it() {
    if (passed_over_ == 0) return true;
    --passed_over_;
    return false;
  }
  void found(bool something) {
    in_vain_ = something ? 0 : std::min(in_vain_ + 1, kMost);
    passed_over_ = (std::uint32_t{1} << in_vain_) - 1;
  }

 private:
  static constexpr std::uint32_t kMost = 10;
  std::uint32_t in_vain_ = 0;  // in a row
  std::uint32_t passed_over_ = 0;
};

}  // namespace moolink::runtime
