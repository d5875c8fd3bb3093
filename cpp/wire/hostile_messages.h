#pragma once

// A hostile peer's frames, for tests of their readers: MOOLINK_LIE=loan.offset=0x7fffffff makes
// this process follow the protocol except for one number. tests/hooks/wire has the names.
// Compiled in only for development builds, like crash points.

#include <cstdint>
#include <optional>

namespace moolink::wire {

#ifdef MOOLINK_CRASH_POINTS

// The value of MOOLINK_LIE for the number of this name; none: the true one.
std::optional<std::uint64_t> lie_about(const char* name);

struct MessageHead;
struct ChunkHead;
struct Want;
struct Grant;
struct Done;
struct Hello;

// A greeting of another version: hello.version=N speaks that one only; hello.next=N speaks N more
// than this one, has features and fields that this one does not know, and keeps to this one after.
// hello.features=N has these features only.
void lie_about_version(Hello& hello);

void lie_in(MessageHead& head);
void lie_in(ChunkHead& chunk);
void lie_in(Want& want);
void lie_in(Grant& grant);
void lie_in(Done& done);

// A frame's control as it is sent.
template <class Control>
Control told(Control control) {
  if constexpr (requires { lie_in(control); }) lie_in(control);
  return control;
}

#else

constexpr std::optional<std::uint64_t> lie_about(const char* /*name*/) { return std::nullopt; }

template <class Hello>
constexpr void lie_about_version(Hello& /*hello*/) {}

// For use within one expression: the referenced object may be destroyed then.
template <class Control>
constexpr const Control& told(const Control& control) {
  return control;  // NOLINT(bugprone-return-const-ref-from-parameter)
}

#endif

// Changes the number if MOOLINK_LIE names it.
template <class Number>
constexpr void lie(const char* name, Number& number) {
  if (const auto told = lie_about(name)) number = static_cast<Number>(*told);
}

}  // namespace moolink::wire
