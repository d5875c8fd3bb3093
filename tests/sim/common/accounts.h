#pragma once

// What must be true of a group of learners when all is quiet again.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/uid.h"
#include "common/learner.h"
#include "common/registry.h"

namespace moolink::sim {

// A learner that lives at the end.
struct Account {
  std::string name;
  const Learner* learner = nullptr;
  bool disturbed = false;  // it may have lost contributions, for something has befallen it
};

// Contributions that were named as lost, and the peers that did, with the number of snapshots that
// they had installed by then.
using Namers = std::map<Uid, std::uint64_t>;
using LostContributions = std::map<Key, Namers>;

// All parameters are the same, by the same rounds.
void check_histories(const Registry& registry, const std::vector<Account>& accounts);

// Each contribution of the living is in one round, or waits for the next, or was dropped by its
// owner, who knows it; what was called lost is in none.
void check_contributions(const Registry& registry, const std::vector<Account>& accounts,
                         const LostContributions& lost);

}  // namespace moolink::sim
