#pragma once

#include <optional>

#include "base/barrier.h"
#include "base/thread_safety.h"
#include "base/time.h"
#include "runtime/engine/context.h"

namespace moolink::runtime {

// Runs `begin`, which leads to finish(*waiter), and waits for that, for `within` at most, unless
// one of them fails. Releases the lock meanwhile; `waiter` is null afterwards.
template <class Begin>
void wait_within(Context& context, Engine::Lock& lock, Waiter*& waiter, const char* what,
                 Duration within, const Begin& begin) MOOLINK_LOCKED {
  std::optional<Waiter> waits;
  const auto wait = [&]() MOOLINK_LOCKED {
    waits.emplace();
    waits->what = what;
    waiter = &*waits;
    begin();
    context.wait(lock, *waits, io::now() + within, {});
  };
  guard(wait, [](const Error&) {});
  waiter = nullptr;
}

}  // namespace moolink::runtime
