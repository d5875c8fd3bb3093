#pragma once

// Makes the library fail on purpose. Linked into a program, this file's twin takes the place of
// operator new, aligned_alloc and the system calls that the library uses. A failure point is one
// of them with the stack of calls that led to it; it fails once, when it is armed and reached.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moolink::faults {

using PointId = std::uint64_t;

// Every point reached from now on is noted.
void record();
// Takes back record() and arm().
void rest();
// In the order in which they were first reached.
std::vector<PointId> recorded();
// The next time that the point is reached it fails; no other one does.
void arm(PointId point);
bool fired();
// For people: what failed, and its callers, innermost first.
std::string describe(PointId point);

// Nothing fails on this thread meanwhile: the code is the test's own.
class Shield {
 public:
  Shield() { ++depth; }
  ~Shield() { --depth; }
  Shield(const Shield&) = delete;
  Shield& operator=(const Shield&) = delete;

  static thread_local int depth;
};

// Ends the shield for the time of a call into the library.
template <class Call>
auto inside(Call&& call) {
  struct Lowered {
    int depth = Shield::depth;
    Lowered() { Shield::depth = 0; }
    ~Lowered() { Shield::depth = depth; }
  } const lowered;
  return call();
}

}  // namespace moolink::faults
