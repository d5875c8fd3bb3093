#pragma once

// What a hostile peer writes, for tests of those who read it: MOOLINK_LIE=loan.offset=0x7fffffff
// makes this process keep to the protocol but for one number. lies.cc has the names. Compiled in
// only for development builds, as crash points are.

namespace moolink::wire {

#ifdef MOOLINK_CRASH_POINTS

struct MessageHead;
struct ChunkHead;
struct Want;
struct Grant;
struct Done;

MessageHead told(const MessageHead& head);
ChunkHead told(const ChunkHead& chunk);
Want told(const Want& want);
Grant told(const Grant& grant);
Done told(const Done& done);

#endif

// For use within one expression: what it refers to may go then.
template <class Control>
constexpr const Control& told(const Control& control) {
  return control;  // NOLINT(bugprone-return-const-ref-from-parameter)
}

}  // namespace moolink::wire
