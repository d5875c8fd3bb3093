// sim_stack [--seeds A..B] [--mutant NAME] [--trace] [--list-mutants] [--print SEED] [--scenario]
//
// With --scenario one scenario is read from standard input (stack/scenario.h says how it is
// written); --print writes the one that a seed stands for.

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/program.h"
#include "stack/scenario.h"
#include "stack/world.h"

namespace moolink::sim {
namespace {

std::uint64_t live(Scenario scenario, bool trace) {
  return World(std::move(scenario), trace).run();
}

}  // namespace
}  // namespace moolink::sim

int main(int argc, char** argv) {
  using namespace moolink::sim;
  std::vector<char*> arguments(argv, argv + argc);
  std::optional<Scenario> given;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    const std::string_view flag = arguments[i];
    if (flag == "--print" && i + 1 < arguments.size()) {
      const std::uint64_t seed = std::strtoull(arguments[i + 1], nullptr, 10);
      std::fputs(Scenario::random(seed).text().c_str(), stdout);
      return 0;
    }
    if (flag != "--scenario") continue;
    arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(i));
    try {
      given = Scenario::parse(std::string(std::istreambuf_iterator<char>(std::cin), {}));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return 2;
    }
    break;
  }
  std::string once[] = {"--seeds", "0"};
  if (given) {
    for (std::string& word : once) arguments.push_back(word.data());
  }
  return run_program(static_cast<int>(arguments.size()), arguments.data(), "stack",
                     [&](std::uint64_t seed, bool trace) {
                       return live(given ? *given : Scenario::random(seed), trace);
                     });
}
