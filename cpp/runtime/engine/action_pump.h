#pragma once

#include <variant>

#include "base/barrier.h"
#include "base/error.h"
#include "base/scoped.h"
#include "base/thread_safety.h"

namespace moolink::runtime {

// Carries out the actions of one machine, in their order, each behind the exception barrier.
class ActionPump {
 public:
  // `take` returns the machine's next actions, a container of variants that is empty once there are
  // none. `perform` carries out one; if it throws, `end` gets the action and the error, and ends
  // the operation that the action is for. A call from within `perform`, or from its callees,
  // returns at once: the outer loop takes the new actions after the ones before them.
  template <class Take, class Perform, class End>
  void run(Take&& take, Perform&& perform, End&& end) MOOLINK_LOCKED {
    if (running_) return;
    const Scoped running(running_);
    for (auto&& actions = take(); !actions.empty(); actions = take()) {
      for (auto& action : actions) {
        guard([&] { std::visit(perform, action); },
              [&](const Error& error) {
                std::visit([&](auto& which) MOOLINK_LOCKED { end(which, error); }, action);
              });
      }
    }
  }

 private:
  bool running_ = false;
};

}  // namespace moolink::runtime
