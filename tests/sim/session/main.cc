#include "common/program.h"
#include "session/world.h"

int main(int argc, char** argv) {
  const std::vector<std::string> mutants = {
      "ack_before_complete",
      "ack_one_too_many",
      "skip_duplicate_removal",
      "ignore_lane_order",
      "accept_old_attempt",
      "no_replay_after_reconnect",
      "no_failover",
      "keep_old_writer",
      "complete_when_announced",
      "deliver_twice_after_failover",
      "done_before_filled",
      "ttl_forgotten_on_replay",
      "forget_pending_on_restart",
      "ignore_window",
      "resume_unknown_session",
      "loan_ends_with_acknowledgement",
      "loans_outlive_session",
      "new_loan_each_attempt",
      "return_what_is_held",
      "keep_unused_loans",
      "forget_returns_when_full",
      "lend_in_a_later_attempt",
      "standing_grant_taken_twice",
      "keep_unused_standing",
      "placed_in_every_attempt",
  };
  return moolink::sim::run_program(
      argc, argv, "session",
      [](std::uint64_t seed, bool trace) { return moolink::sim::World(seed, trace).run(); },
      mutants);
}
