#pragma once

// The mutants of this folder, mistakes that the simulators must catch.

#include <string>
#include <string_view>
#include <vector>

namespace moolink {

// The one that this run of a simulator makes.
inline std::string_view active_mutant;

inline bool mutant(std::string_view name) { return active_mutant == name; }

}  // namespace moolink

namespace moolink::sim {

// Those that this simulator must catch.
std::vector<std::string> mutants_of(std::string_view simulator);

}  // namespace moolink::sim
