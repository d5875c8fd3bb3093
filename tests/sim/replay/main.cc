#include <string>
#include <vector>

#include "common/program.h"
#include "replay/world.h"

int main(int argc, char** argv) {
  const std::vector<std::string> mutants = {
      "begin_keys_anew",               // a restored table uses keys a second time
      "forget_counts",                 // a restored table limits as if it were new
      "forget_generations",            // a key means whatever lies in its slot now
      "insert_only_when_asked",        // samples let no waiting insert go on
      "insert_past_the_error",         // one insert more than max_diff allows
      "keep_rows_of_removed",          // removed items' rows are never free
      "keep_withdrawn_rows",           // those of items that were not inserted either
      "last_come_first",               // of waiting inserts
      "lend_rows_without_reference",   // a batch's rows are written while it is copied
      "no_free_inserts",               // below min_size inserts wait, too
      "once_too_often",                // an item is sampled more than max_times_sampled times
      "removal_wakes_nobody",          // inserts wait on although there is room
      "removals_do_not_count",         // a table that was emptied is sampled
      "remover_keeps_old_priorities",  // the remover does not hear of new ones
      "reuse_slots_for_ever",          // generations overflow: keys are negative, then repeat
      "sample_below_min_size",         // before there are enough items
      "sample_past_the_error",         // one sample more than min_diff allows
  };
  return moolink::sim::run_program(argc, argv, mutants, [](std::uint64_t seed, bool trace) {
    moolink::sim::ReplayWorld world(seed, trace);
    world.run();
    return world.hash();
  });
}
