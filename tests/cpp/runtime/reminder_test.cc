// When a wait is said, and said again.

#include "runtime/engine/reminder.h"

#include <vector>

#include "check.h"

namespace reminder_test {

using namespace moolink;
using runtime::Reminder;

Time at(int second) { return Time(seconds(1000 + second)); }

// Whoever looks every second from `begin` to `end` at a wait that began at `begin` says it then.
std::vector<int> said(Reminder& reminder, int begin, int end) {
  std::vector<int> moments;
  for (int second = begin; second <= end; ++second) {
    if (reminder.due(at(begin), at(second))) moments.push_back(second);
  }
  return moments;
}

TEST("reminder: a wait is said after 3 s, and again after growing pauses that end at 300 s") {
  Reminder reminder;
  CHECK(said(reminder, 0, 2).empty());
  CHECK(said(reminder, 0, 1100) == std::vector<int>({3, 13, 43, 143, 443, 743, 1043}));
}

TEST("reminder: waits that follow one another share the pauses") {
  Reminder reminder;
  CHECK(said(reminder, 0, 5) == std::vector<int>({3}));
  CHECK(said(reminder, 6, 12).empty());
  CHECK(said(reminder, 10, 20) == std::vector<int>({13}));
}

TEST("reminder: after a calm time a wait is said at once again") {
  Reminder reminder;
  CHECK(said(reminder, 0, 50) == std::vector<int>({3, 13, 43}));
  CHECK(said(reminder, 200, 220) == std::vector<int>({203, 213}));
}

TEST("reminder: the next time is the one at which it is due") {
  Reminder reminder;
  CHECK(reminder.next(at(0)) == at(3));
  CHECK(reminder.due(at(0), at(3)));
  CHECK(reminder.next(at(0)) == at(13));
}

}  // namespace reminder_test
