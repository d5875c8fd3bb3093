#include "transport/admission.h"

#include "check.h"

namespace moolink::transport {
namespace admission_test {

const Time kStart{seconds(100)};

Admission::Config small() {
  Admission::Config config;
  config.waiting = 4;
  config.of_source = 2;
  config.free_failures = 3;
  return config;
}

TEST("admission: unauthenticated connections are few, in all and from one source") {
  Admission admission(small());
  for (wire::ConnectionId id = 1; id <= 2; ++id) {
    CHECK(admission.admit(kStart, "a", false).admitted);
    admission.accepted(kStart, id, "a");
  }
  CHECK(!admission.admit(kStart, "a", false).admitted);
  CHECK(admission.admit(kStart, "b", false).admitted);
  admission.accepted(kStart, 3, "b");
  CHECK(admission.admit(kStart, "c", false).admitted);
  admission.accepted(kStart, 4, "c");
  CHECK(!admission.admit(kStart, "d", false).admitted);
  admission.authenticated(1);  // no stranger any more
  CHECK(admission.admit(kStart, "d", false).admitted);
  CHECK_EQ(admission.waiting(), std::size_t{3});
}

TEST("admission: one that keeps silent makes room once it has had its time") {
  Admission admission(small());
  admission.accepted(kStart, 1, "a");
  admission.accepted(kStart + milliseconds(1), 2, "a");
  const Time later = kStart + small().grace;
  const Admission::Answer answer = admission.admit(later, "a", false);
  CHECK(answer.admitted && answer.replaced == wire::ConnectionId{1});
  admission.closed(later, 1);
  admission.accepted(later, 3, "a");
  admission.accepted(later, 4, "b");
  admission.accepted(later, 5, "c");
  // In all: of the source that has the most of them, not of others.
  const Admission::Answer full = admission.admit(later + milliseconds(1), "d", false);
  CHECK(full.admitted && full.replaced == wire::ConnectionId{2});
  admission.closed(later, 2);
  admission.accepted(later, 6, "d");
  CHECK(!admission.admit(later, "e", false).admitted);  // the rest have just come
}

TEST("admission: a source of failures is turned away for a growing time, and never quite") {
  Admission admission(small());
  Time now = kStart;
  wire::ConnectionId id = 0;
  const auto fail = [&] {
    admission.accepted(now, ++id, "a");
    admission.closed(now, id);
  };
  for (int i = 0; i < 3; ++i) fail();
  for (int i = 0; i < 3; ++i) CHECK(admission.admit(now, "a", false).admitted);
  fail();
  CHECK(admission.admit(now, "a", false).admitted);  // once, all the same
  CHECK(!admission.admit(now, "a", false).admitted);
  CHECK(admission.admit(now, "b", false).admitted);
  CHECK(!admission.admit(now + milliseconds(99), "a", false).admitted);
  now += milliseconds(100);
  for (int i = 0; i < 3; ++i) CHECK(admission.admit(now, "a", false).admitted);
  fail();
  fail();  // 400 ms now
  now += small().trickle;
  CHECK(admission.admit(now, "a", false).admitted);
  CHECK(!admission.admit(now + small().trickle - milliseconds(1), "a", false).admitted);
  // A proof makes the source a good one.
  admission.accepted(now, ++id, "a");
  admission.authenticated(id);
  for (int i = 0; i < 3; ++i) CHECK(admission.admit(now, "a", false).admitted);
}

TEST("admission: this host is never turned away") {
  Admission admission(small());
  for (wire::ConnectionId id = 1; id < 100; ++id) {
    CHECK(admission.admit(kStart, "here", true).admitted);
    admission.accepted(kStart, id, "here");
    admission.closed(kStart, id);
  }
  for (wire::ConnectionId id = 100; id < 104; ++id) {
    CHECK(admission.admit(kStart, "here", true).admitted);  // and may have all the places
    admission.accepted(kStart, id, "here");
  }
  CHECK(!admission.admit(kStart, "here", true).admitted);
}

TEST("admission: so many sources are remembered and no more") {
  Admission::Config config;
  config.sources = 10;
  Admission admission(config);
  for (wire::ConnectionId id = 1; id < 100; ++id) {
    admission.accepted(kStart + milliseconds(static_cast<int>(id)), id, std::to_string(id));
    admission.closed(kStart + milliseconds(static_cast<int>(id)), id);
  }
  CHECK_EQ(admission.sources(), std::size_t{10});
}

}  // namespace admission_test
}  // namespace moolink::transport
