#include "common/accounts.h"

#include "common/program.h"
#include "common/simulation.h"

namespace moolink::sim {
namespace {

void check_contributions_of(const Registry& registry, const Account& account, std::uint64_t node) {
  std::int64_t waiting = 0;
  bool gap = false;
  for (const std::uint64_t k : registry.offers_of(account.learner->instance())) {
    const Key key{account.learner->instance(), k};
    const std::size_t times = registry.times_in(node, key);
    const std::string name = account.name + "'s contribution " + std::to_string(k);
    require(times <= 1, name + " is in two rounds");
    if (account.learner->dropped().contains(k)) continue;
    if (times == 1) {
      require(!gap, name + " was taken before an earlier one");
      ++coverage["contributions counted"];
      continue;
    }
    if (account.learner->was_overruled(k)) {
      require(account.disturbed, name + " was undone though nothing befell its owner");
      continue;
    }
    gap = true;
    waiting += registry.batch_of(key);
  }
  require(waiting < registry.largest_virtual_batch(), account.name + " lost contributions");
}

}  // namespace

void check_histories(const Registry& registry, const std::vector<Account>& accounts) {
  const Learner& first = *accounts.front().learner;
  for (const Account& account : accounts) {
    const Learner& learner = *account.learner;
    require(learner.node() == first.node(),
            account.name + " is at version " + std::to_string(learner.version()) +
                " of another history than " + accounts.front().name + " at " +
                std::to_string(first.version()) + "; they part after version " +
                std::to_string(registry.parting(learner.node(), first.node())));
    coverage["rounds applied"] += learner.applied();
    coverage["snapshots installed"] += learner.installed();
  }
}

void check_contributions(const Registry& registry, const std::vector<Account>& accounts,
                         const LostContributions& lost) {
  const std::uint64_t node = accounts.front().learner->node();
  for (const Account& account : accounts) check_contributions_of(registry, account, node);
  for (const Account& account : accounts) {
    for (const auto& [key, namers] : lost) {
      // What it said of a history that a snapshot has replaced since is of no account.
      const auto namer = namers.find(account.learner->instance());
      if (namer == namers.end() || namer->second != account.learner->installed()) continue;
      require(registry.times_in(node, key) == 0,
              account.name + " called a contribution lost that is in a round");
    }
  }
}

}  // namespace moolink::sim
