#pragma once

// A loop whose only thread is the fuzzer's.

#include "io/loop.h"

namespace moolink::fuzz {

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
