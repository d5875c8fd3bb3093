#pragma once

#include <string>

#include "base/time.h"

namespace moolink::runtime {

enum class Describe { waits, everything };

// What the engine's clock drives: a machine and what carries its actions out. Called with the
// engine's lock held.
class Driven {
 public:
  virtual ~Driven() = default;
  virtual void tick(Time now) = 0;
  // When tick() is wanted at the latest; kNever if nothing is awaited.
  virtual Time next_deadline() const = 0;
  // The end of a turn: what was written in it may be sent.
  virtual void flush() {}
  // Adds to a text for people how things stand, or only who waits for whom.
  virtual void describe(Time /*now*/, Describe /*how*/, std::string& /*text*/) const {}
};

}  // namespace moolink::runtime
