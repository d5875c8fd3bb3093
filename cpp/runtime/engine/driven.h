#pragma once

#include <string>

#include "base/time.h"

namespace moolink::runtime {

enum class Describe { waits, everything };

// Driven by the engine's clock: a machine with the code that carries out its actions. Called with
// the engine's lock held.
class Driven {
 public:
  virtual ~Driven() = default;
  virtual void tick(Time now) = 0;
  // The latest time for the next tick(); kNever if nothing is awaited.
  virtual Time next_deadline() const = 0;
  // The end of a turn: messages written in it may be sent.
  virtual void flush() {}
  // Appends its state to a text for people, or only its waits.
  virtual void describe(Time /*now*/, Describe /*how*/, std::string& /*text*/) const {}
};

}  // namespace moolink::runtime
