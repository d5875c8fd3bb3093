// What a peer says that it waits for.

#include <string>

#include "accumulate/peers.h"
#include "check.h"

namespace {

using namespace moolink;
using namespace moolink::accumulate;

void check_says(const Machine& machine, const std::string& part) {
  if (machine.explain().find(part) != std::string::npos) return;
  CHECK_EQ(machine.explain(), part);
}

TEST("explain: a member that has no accumulator of this name is named, and what to do") {
  Config config;
  config.group = "group/model";
  config.instance = Uid{1, 1};
  config.name = "a";
  Machine machine(config);
  CHECK_EQ(machine.explain(), "");
  group::View view;
  view.epoch = 3;
  view.lineage = Uid{5, 5};
  view.members.push_back({config.instance, "a", 0, Uid{9, 9}, group::Role::member, 0});
  view.members.push_back({Uid{1, 2}, "b", 0, Uid{9, 9}, group::Role::member, 0});
  machine.view(Time(seconds(1)), std::make_shared<const group::View>(view));
  check_says(machine, "'b' in membership change 3: no accumulator 'group/model' answers there");
}

TEST("explain: a leader says who has contributed nothing, who has no result and who applies none") {
  Peers peers(2);
  peers[0].set_virtual_batch_size(2);
  peers.settle();
  check_says(peers[1], "the model's state from the leader 'p0'");
  peers.share_state(state_bytes());
  peers.contribute(0);
  check_says(peers[0], "a batch of 1 of 2 for round 8 is here, none of 'p1'");
  check_says(peers[1], "round 8 of the leader 'p0'");
  peers[0].set_virtual_batch_size(1'000'000);
  CHECK_EQ(peers[0].gathered(), "a batch of 1 of 1,000,000 for round 8 is here");
  CHECK_EQ(peers[1].gathered(), "");
  peers[0].set_virtual_batch_size(1);
  for (int round = 0; round < 4; ++round) {  // of which the other one applies none
    peers.contribute(0);
    peers.apply(0);
  }
  check_says(peers[0], "'p1' to apply the rounds that are there");
}

TEST("explain: a leader names who takes no part in a reduction") {
  Peers peers(2);
  peers.share_state(state_bytes());
  peers.hold_reductions();
  peers.contribute(0);
  check_says(peers[0], "'p0', 'p1' to take part in the reduction of round 8");
}

}  // namespace
