#pragma once

// Named mistakes that the simulator must detect. In a production build every test below is the
// constant false and compiles to nothing; only development builds define MOOLINK_MUTANTS.

#ifdef MOOLINK_MUTANTS
#include <string_view>

namespace moolink {

// The mistake that the running test requests; one test program runs one mutant at a time.
inline std::string_view active_mutant;

inline bool mutant(std::string_view name) { return active_mutant == name; }

}  // namespace moolink
#else
namespace moolink {

constexpr bool mutant(const char*) { return false; }

}  // namespace moolink
#endif
