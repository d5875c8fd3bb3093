#include "common/program.h"
#include "group/scenarios.h"

int main(int argc, char** argv) {
  // With the invariant of docs/design/protocol/group.md that each violates.
  const std::vector<std::string> mutants = {
      "broker_reuses_epoch",                         // 2
      "member_accepts_lower_epoch",                  // 1
      "apply_stale_frames",                          // 4
      "broker_forgets_on_restart_issues_low_epoch",  // 2: ignores announced floors
      "no_stride_after_restart",                     // 2
      "evict_self_late",                             // 3: ignores a view without itself
      "evict_frozen_early",                          // 7: limit 0.8 s
      "evict_last_holder",                           // 10
      "evict_both_reporters",                        // 9: members that leave still suspect
      "suspect_while_late",                          // 7
      "join_as_member_without_snapshot",             // 5
      "new_lineage_while_holder_lives",              // 6, 10
      "zombie_keeps_state",                          // 5: after its eviction
      "young_lineage_does_not_yield",                // 6
      "adopted_lineage_does_not_yield",              // 6: ignores its age
      "lost_sessions_are_not_told",                  // 12: no gaps
  };
  return moolink::sim::run_program(argc, argv, mutants, moolink::sim::run_seed);
}
