#pragma once

// The command line of a simulation:
//   sim_x [--seeds A..B] [--mutant NAME] [--trace] [--list-mutants]
// prints one line of JSON; exits with 1 if a run broke an invariant, with 2 on wrong usage.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/simulation.h"
#include "mutants/mutant.h"

namespace moolink::sim {

// Runs one seed and returns the hash of its trace; throws Violation.
using RunSeed = std::function<std::uint64_t(std::uint64_t seed, bool trace)>;

// How often the runs came to where the invariants bite; a test demands that none stays zero.
inline std::map<std::string, std::uint64_t> coverage;

struct Options {
  std::uint64_t first = 0;
  std::uint64_t last = 299;
  bool trace = false;
  bool list = false;
};

inline bool parse(int argc, char** argv, const std::vector<std::string>& mutants,
                  Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--trace") {
      options.trace = true;
    } else if (flag == "--list-mutants") {
      options.list = true;
    } else if (flag == "--seeds" && i + 1 < argc) {
      char* end = nullptr;
      options.first = options.last = std::strtoull(argv[++i], &end, 10);
      if (std::string_view(end).starts_with("..")) options.last = std::strtoull(end + 2, &end, 10);
      if (*end != '\0' || options.last < options.first) return false;
    } else if (flag == "--mutant" && i + 1 < argc) {
      const std::string_view name = argv[++i];
      for (const std::string& known : mutants) {
        if (known == name) active_mutant = known;
      }
      if (active_mutant.empty()) return false;
    } else {
      return false;
    }
  }
  return true;
}

inline int run_program(int argc, char** argv, std::string_view simulator, const RunSeed& run_seed) {
  const std::vector<std::string> mutants = mutants_of(simulator);
  Options options;
  if (!parse(argc, argv, mutants, options)) {
    std::fprintf(stderr, "usage: %s [--seeds A..B] [--mutant NAME] [--trace] [--list-mutants]\n",
                 argv[0]);
    return 2;
  }
  if (options.list) {
    for (const std::string& name : mutants) std::printf("%s\n", name.c_str());
    return 0;
  }
  std::uint64_t seeds = 0;
  std::uint64_t failures = 0;
  std::uint64_t first_failure = 0;
  Trace all(false);
  for (std::uint64_t seed = options.first; seed <= options.last; ++seed) {
    ++seeds;
    try {
      all.add(run_seed(seed, options.trace));
    } catch (const std::exception& broken) {
      if (failures++ == 0) {
        first_failure = seed;
        std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed),
                     broken.what());
      }
      if (!active_mutant.empty()) break;  // caught
    }
  }
  std::string covered;
  for (const auto& [what, times] : coverage) {
    covered += (covered.empty() ? "\"" : ", \"") + what + "\": " + std::to_string(times);
  }
  std::printf(
      "{\"seeds\": %llu, \"failures\": %llu, \"first_failure\": %s, "
      "\"trace_hash\": \"%016llx\", \"coverage\": {%s}}\n",
      static_cast<unsigned long long>(seeds), static_cast<unsigned long long>(failures),
      failures == 0 ? "null" : std::to_string(first_failure).c_str(),
      static_cast<unsigned long long>(all.hash()), covered.c_str());
  return failures == 0 ? 0 : 1;
}

}  // namespace moolink::sim
