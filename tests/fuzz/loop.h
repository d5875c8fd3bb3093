#pragma once

// A loop whose only thread is the fuzzer's.

#include "base/time.h"
#include "io/loop.h"

namespace moolink::fuzz {

// The process may be stopped in the middle of an input: that decides nothing.
inline constexpr Duration kForEver = std::chrono::hours(1000);

struct NoLock {
  void lock() {}
  void unlock() {}
};

// Takes what has come and what was posted, until nothing is left.
inline void run_all(io::Loop& loop) {
  NoLock alone;
  do {
    loop.turn(alone, Time{});
  } while (!loop.only_woken());
}

}  // namespace moolink::fuzz
