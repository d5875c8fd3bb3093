#include <string>
#include <vector>

#include "common/program.h"
#include "shared_pipeline/world.h"

int main(int argc, char** argv) {
  const std::vector<std::string> mutants = {
      "abandon_in_silence",  // passes rubbish on without saying so
      "put_what_is_not_written",
      "add_everybody",                // also ranks that contribute nothing
      "close_in_silence",             // does not say that what it has lent is its user's again
      "end_what_was_abandoned",       // does not look whether somebody said so
      "end_while_others_read",        // lent memory is the user's again too early
      "exchange_what_was_abandoned",  // gives other hosts a sum of meaningless data
      "forget_an_input",              // of a rank that has several
      "lend_in_silence",              // does not say where its memory is
      "never_ring",                   // stores without a look for sleepers
      "publish_before_copying",       // raises a word before what it tells of is there
      "put_into_unread_windows",      // does not wait until the chunk before was taken
      "reduce_in_another_order",      // on some ranks
      "reduce_into_unread_windows",   // does not wait until the chunk before was taken
      "reduce_without_parts",         // does not wait for what the others put
      "ring_too_late",                // only when the others are a chunk further
      "sleep_without_a_look",         // announces sleep and does not look once more
      "take_the_input",               // as the result, if only the input is lent
      "take_too_early",               // does not wait until the others have reduced
      "tell_of_what_was_given_up",    // though the others are in the next epoch
  };
  return moolink::sim::run_program(argc, argv, mutants, [](std::uint64_t seed, bool trace) {
    moolink::sim::SharedPipelineWorld world(seed, trace);
    world.run();
    return world.hash();
  });
}
