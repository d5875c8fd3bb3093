#include <string>
#include <vector>

#include "common/program.h"
#include "shared_reduce/world.h"

int main(int argc, char** argv) {
  const std::vector<std::string> mutants = {
      "add_everybody",              // sums inputs of ranks that do not contribute
      "announce_too_early",         // overwrites what others still read of operation s - depth
      "complete_when_one_is",       // takes the greatest `red` for the least
      "never_ring",                 // stores without a look for sleepers
      "overwrite_unread_result",    // reduces into a slot that somebody still reads
      "publish_before_reducing",    // raises `red` before the slice is there
      "reduce_in_another_order",    // on some ranks
      "reduce_without_inputs",      // does not wait for `in`
      "sleep_without_a_look",       // announces sleep and does not look once more
      "tell_of_what_was_given_up",  // though the others are in the next epoch
  };
  return moolink::sim::run_program(argc, argv, mutants, [](std::uint64_t seed, bool trace) {
    moolink::sim::SharedReduceWorld world(seed, trace);
    world.run();
    return world.hash();
  });
}
