#pragma once

// A hostile peer's frames, for tests of their readers: MOOLINK_LIE=loan.offset=0x7fffffff makes
// this process follow the protocol except for one number. lies.cc has the names. Compiled in only
// for development builds, like crash points.

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

// For use within one expression: the referenced object may be destroyed then.
template <class Control>
constexpr const Control& told(const Control& control) {
  return control;  // NOLINT(bugprone-return-const-ref-from-parameter)
}

}  // namespace moolink::wire
