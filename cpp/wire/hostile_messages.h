#pragma once

// A hostile peer's frames, for tests of their readers: MOOLINK_LIE=loan.offset=0x7fffffff makes
// this process follow the protocol except for one number. hostile_messages.cc has the names.
// Compiled in only for development builds, like crash points.

namespace moolink::wire {

#ifdef MOOLINK_CRASH_POINTS

struct MessageHead;
struct ChunkHead;
struct Want;
struct Grant;
struct Done;
struct Hello;

// A greeting of another version: hello.version=N speaks that one only; hello.next=N speaks N more
// than this one, has features and fields that this one does not know, and keeps to this one after.
void lie_about_version(Hello& hello);

MessageHead told(const MessageHead& head);
ChunkHead told(const ChunkHead& chunk);
Want told(const Want& want);
Grant told(const Grant& grant);
Done told(const Done& done);

#else

template <class Hello>
constexpr void lie_about_version(Hello& /*hello*/) {}

#endif

// For use within one expression: the referenced object may be destroyed then.
template <class Control>
constexpr const Control& told(const Control& control) {
  return control;  // NOLINT(bugprone-return-const-ref-from-parameter)
}

}  // namespace moolink::wire
