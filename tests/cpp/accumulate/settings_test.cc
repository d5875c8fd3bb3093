// Members whose users have set other numbers than the leader's.

#include <string>

#include "accumulate/peers.h"
#include "check.h"

namespace {

using namespace moolink;
using namespace moolink::accumulate;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST("settings: the leader's virtual batch size counts for all, whatever they have set") {
  Peers peers(2);
  peers[0].set_virtual_batch_size(8);
  peers[1].set_virtual_batch_size(2);
  peers.settle();
  peers.share_state(state_bytes());
  for (int i = 0; i < 3; ++i) {
    CHECK(peers.wants_gradients(1));  // its share is a half of 8
    peers.contribute(1);
  }
  for (int i = 0; i < 4; ++i) peers.contribute(0);
  CHECK(!peers[0].next_result().has_value());
  CHECK(peers.wants_gradients(1));
  peers.contribute(1);  // no second had to pass
  CHECK(peers[0].next_result().has_value());
}

TEST("settings: a leader that sets another size tells it at once, also to those who wait") {
  Peers peers(2);
  peers[0].set_virtual_batch_size(2);
  peers.settle();
  peers.share_state(state_bytes());
  peers.contribute(1);
  CHECK(!peers.wants_gradients(1));
  peers[0].set_virtual_batch_size(8);
  peers.settle();
  CHECK(peers.wants_gradients(1));
}

TEST("settings: a member whose own differ for 10 s is told both and who leads, until they agree") {
  Peers peers(3);
  peers[0].set_virtual_batch_size(4);
  peers[1].set_virtual_batch_size(3);  // and the third none
  peers.settle();
  peers.share_state(state_bytes());
  peers.pass(seconds(5));
  peers.change_epoch();  // the time goes on over it
  peers.pass(seconds(4));
  for (std::size_t i = 0; i < 3; ++i) CHECK_EQ(peers.failure(i), "");
  peers.pass(seconds(2));
  CHECK(
      contains(peers.failure(1), "virtual batch size is 4 at the leader 'p0' and 3 at this peer"));
  CHECK(contains(peers.failure(1), "set_virtual_batch_size()"));
  CHECK_EQ(peers.failure(0), "");
  CHECK_EQ(peers.failure(2), "");
  peers[1].set_virtual_batch_size(4);
  peers.pass(milliseconds(250));
  CHECK_EQ(peers.failure(1), "");
}

TEST("settings: peers that change the size one after the other are left alone") {
  Peers peers(2);
  peers[0].set_virtual_batch_size(4);
  peers[1].set_virtual_batch_size(4);
  peers.settle();
  peers.share_state(state_bytes());
  for (const std::int64_t size : {8, 16, 2}) {
    peers[0].set_virtual_batch_size(size);
    peers.pass(seconds(6));
    peers.change_epoch();
    peers[1].set_virtual_batch_size(size);
    peers.pass(seconds(6));
  }
  CHECK_EQ(peers.failure(0), "");
  CHECK_EQ(peers.failure(1), "");
}

TEST("settings: other numbers of parallel gradients are told as well") {
  Peers peers(2);
  peers[0].set_parallel_gradients(2);
  peers[1].set_parallel_gradients(3);
  peers.settle();
  peers.share_state(state_bytes());
  peers.pass(seconds(11));
  CHECK(contains(peers.failure(1), "number of parallel gradients is 2"));
}

TEST("settings: those that no leader can have are ignored") {
  Peers peers(2);
  peers.share_state(state_bytes());
  peers[1].set_virtual_batch_size(1);
  for (const Settings lie : {Settings{0, 1}, Settings{-1, 1}, Settings{std::int64_t{1} << 62, 1},
                             Settings{1, 0}, Settings{1, 257}}) {
    peers.lie(0, 1, lie);
  }
  peers.pass(seconds(11));
  CHECK_EQ(peers.failure(1), "");
  CHECK(peers.wants_gradients(1));
}

}  // namespace
