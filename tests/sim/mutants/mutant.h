#pragma once

// The mutants of this folder, mistakes that the simulators must catch.

#include <string>
#include <string_view>
#include <vector>

#include "base/mutant.h"

namespace moolink::sim {

// Those that this simulator must catch.
std::vector<std::string> mutants_of(std::string_view simulator);

}  // namespace moolink::sim
