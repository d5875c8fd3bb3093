#include "common/program.h"
#include "group/scenarios.h"

int main(int argc, char** argv) {
  const std::vector<std::string> mutants = {
      "broker_reuses_epoch",
      "member_accepts_lower_epoch",
      "apply_stale_frames",
      "broker_forgets_on_restart_issues_low_epoch",
      "no_stride_after_restart",
      "evict_self_late",
      "evict_frozen_early",
      "evict_last_holder",
      "evict_both_reporters",
      "suspect_while_late",
      "join_as_member_without_snapshot",
      "new_lineage_while_holder_lives",
      "zombie_keeps_state",
      "young_lineage_does_not_yield",
      "adopted_lineage_does_not_yield",
      "lost_sessions_are_not_told",
  };
  return moolink::sim::run_program(argc, argv, mutants, moolink::sim::run_seed);
}
