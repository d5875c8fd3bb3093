// sim_group --seeds A..B [--mutant NAME] [--stop] [--trace] [--list-mutants]

#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include "base/mutant.h"
#include "group/scenarios.h"

namespace {

constexpr std::array kMutants = {
    "broker_reuses_epoch",
    "member_accepts_lower_epoch",
    "apply_stale_frames",
    "broker_forgets_on_restart_issues_low_epoch",
    "no_stride_after_restart",
    "evict_self_late",
    "evict_frozen_early",
    "evict_last_holder",
    "evict_both_accusers",
    "accuse_while_late",
    "join_as_member_without_snapshot",
    "new_lineage_while_holder_lives",
    "zombie_keeps_state",
    "broker_skips_gathering",
};

struct Arguments {
  std::uint64_t first = 1;
  std::uint64_t last = 100;
  bool stop = false;  // at the first failure
  bool trace = false;
};

bool parse_range(std::string_view text, Arguments& arguments) {
  const auto dots = text.find("..");
  if (dots == std::string_view::npos) return false;
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), text.data() + dots, arguments.first);
  const auto last = std::from_chars(text.data() + dots + 2, end, arguments.last);
  return first.ec == std::errc() && last.ec == std::errc() && last.ptr == end;
}

int run(const Arguments& arguments) {
  std::uint64_t failures = 0;
  std::uint64_t first_failure = 0;
  std::uint64_t hash = 0;
  std::uint64_t seed = arguments.first;
  for (; seed <= arguments.last; ++seed) {
    try {
      hash = hash * 0x100000001b3ULL + moolink::sim::run_seed(seed, arguments.trace);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), e.what());
      if (failures++ == 0) first_failure = seed;
      if (arguments.stop) break;
    }
  }
  const std::string failed = failures == 0 ? "null" : std::to_string(first_failure);
  std::printf(
      "{\"seeds\": %llu, \"failures\": %llu, \"first_failure\": %s, \"trace_hash\": \"%016llx\"}\n",
      static_cast<unsigned long long>(std::min(seed, arguments.last) - arguments.first + 1),
      static_cast<unsigned long long>(failures), failed.c_str(),
      static_cast<unsigned long long>(hash));
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    const bool valued = i + 1 < argc;
    if (option == "--seeds" && valued && parse_range(argv[++i], arguments)) continue;
    if (option == "--mutant" && valued) {
      moolink::active_mutant = argv[++i];
      continue;
    }
    if (option == "--stop") {
      arguments.stop = true;
    } else if (option == "--trace") {
      arguments.trace = true;
    } else if (option == "--list-mutants") {
      for (const char* name : kMutants) std::puts(name);
      return 0;
    } else {
      std::fputs(
          "usage: sim_group --seeds A..B [--mutant NAME] [--stop] [--trace] [--list-mutants]\n",
          stderr);
      return 2;
    }
  }
  return run(arguments);
}
