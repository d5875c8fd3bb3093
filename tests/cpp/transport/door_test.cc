#include "transport/door.h"

#include "check.h"

namespace moolink::transport {
namespace door_test {

const Time kStart{seconds(100)};

Door::Config small() {
  Door::Config config;
  config.strangers = 4;
  config.of_source = 2;
  config.free_failures = 3;
  return config;
}

TEST("door: strangers are few, in all and from one source") {
  Door door(small());
  for (Door::Guest guest = 1; guest <= 2; ++guest) {
    CHECK(door.knock(kStart, "a", false).welcome);
    door.entered(kStart, guest, "a");
  }
  CHECK(!door.knock(kStart, "a", false).welcome);
  CHECK(door.knock(kStart, "b", false).welcome);
  door.entered(kStart, 3, "b");
  CHECK(door.knock(kStart, "c", false).welcome);
  door.entered(kStart, 4, "c");
  CHECK(!door.knock(kStart, "d", false).welcome);
  door.proven(1);  // no stranger any more
  CHECK(door.knock(kStart, "d", false).welcome);
  CHECK_EQ(door.strangers(), std::size_t{3});
}

TEST("door: one that keeps silent makes room once it has had its time") {
  Door door(small());
  door.entered(kStart, 1, "a");
  door.entered(kStart + milliseconds(1), 2, "a");
  const Time later = kStart + small().grace;
  const Door::Answer answer = door.knock(later, "a", false);
  CHECK(answer.welcome && answer.leaves == Door::Guest{1});
  door.left(later, 1);
  door.entered(later, 3, "a");
  door.entered(later, 4, "b");
  door.entered(later, 5, "c");
  // In all: of the source that has the most of them, not of others.
  const Door::Answer full = door.knock(later + milliseconds(1), "d", false);
  CHECK(full.welcome && full.leaves == Door::Guest{2});
  door.left(later, 2);
  door.entered(later, 6, "d");
  CHECK(!door.knock(later, "e", false).welcome);  // the rest have just come
}

TEST("door: a source of failures is turned away for a growing time, and never quite") {
  Door door(small());
  Time now = kStart;
  Door::Guest guest = 0;
  const auto fail = [&] {
    door.entered(now, ++guest, "a");
    door.left(now, guest);
  };
  for (int i = 0; i < 3; ++i) fail();
  for (int i = 0; i < 3; ++i) CHECK(door.knock(now, "a", false).welcome);
  fail();
  CHECK(door.knock(now, "a", false).welcome);  // once, all the same
  CHECK(!door.knock(now, "a", false).welcome);
  CHECK(door.knock(now, "b", false).welcome);
  CHECK(!door.knock(now + milliseconds(99), "a", false).welcome);
  now += milliseconds(100);
  for (int i = 0; i < 3; ++i) CHECK(door.knock(now, "a", false).welcome);
  fail();
  fail();  // 400 ms now
  now += small().trickle;
  CHECK(door.knock(now, "a", false).welcome);
  CHECK(!door.knock(now + small().trickle - milliseconds(1), "a", false).welcome);
  // A proof makes the source a good one.
  door.entered(now, ++guest, "a");
  door.proven(guest);
  for (int i = 0; i < 3; ++i) CHECK(door.knock(now, "a", false).welcome);
}

TEST("door: this host is never turned away") {
  Door door(small());
  for (Door::Guest guest = 1; guest < 100; ++guest) {
    CHECK(door.knock(kStart, "here", true).welcome);
    door.entered(kStart, guest, "here");
    door.left(kStart, guest);
  }
  for (Door::Guest guest = 100; guest < 104; ++guest) {
    CHECK(door.knock(kStart, "here", true).welcome);  // and may have all the places
    door.entered(kStart, guest, "here");
  }
  CHECK(!door.knock(kStart, "here", true).welcome);
}

TEST("door: so many sources are remembered and no more") {
  Door::Config config;
  config.sources = 10;
  Door door(config);
  for (Door::Guest guest = 1; guest < 100; ++guest) {
    door.entered(kStart + milliseconds(static_cast<int>(guest)), guest, std::to_string(guest));
    door.left(kStart + milliseconds(static_cast<int>(guest)), guest);
  }
  CHECK_EQ(door.sources(), std::size_t{10});
}

}  // namespace door_test
}  // namespace moolink::transport
