#include "common/program.h"
#include "rpc/world.h"

int main(int argc, char** argv) {
  const std::vector<std::string> mutants = {
      "services_by_name",       "undelivered_in_silence",
      "complete_twice",         "cancel_is_local",
      "run_expired_call",       "accept_duplicate_name",
      "give_name_away_at_once", "first_refusal_is_final",
      "send_again_after_loss",  "forget_calls_of_lost_peer",
      "forget_early_cancel",    "window_stays_shut",
      "handlers_stay_held",     "drop_when_window_is_full",
      "unordered_services",     "overtake_in_lane",
      "overtake_in_queue",      "no_redial",
      "no_redial_when_silent",  "search_asks_once",
      "credit_is_not_told",     "credit_goes_back",
      "items_as_they_come",     "end_overtakes_items",
      "loans_are_not_returned", "accept_any_proof",
      "prove_without_nonce",    "same_proof_both_ways",
      "attach_before_proof",    "believe_names_of_refusals",
      "ignore_scopes",          "tell_of_other_groups",
      "ask_other_groups",       "first_namesake",
      "late_namesake",          "token_before_group",
  };
  return moolink::sim::run_program(
      argc, argv, "rpc",
      [](std::uint64_t seed, bool trace) { return moolink::sim::World(seed, trace).run(); },
      mutants);
}
