#pragma once

#include <cstdint>

namespace moolink::sim {

// Runs the scenario that `seed` picks; throws Violation. Returns the hash of its trace.
std::uint64_t run_seed(std::uint64_t seed, bool trace);

}  // namespace moolink::sim
