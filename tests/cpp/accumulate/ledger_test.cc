#include "accumulate/ledger.h"

#include <memory>

#include "check.h"

namespace {

using namespace moolink;
using namespace moolink::accumulate;

const Uid kSelf{1, 1};
const Time kNow{seconds(1)};

RoundRecord record(std::uint64_t round, std::vector<std::uint64_t> own) {
  RoundRecord record;
  record.round = round;
  for (const std::uint64_t k : own) record.contributions.push_back({kSelf, "self", k, 2});
  record.total = 2 * static_cast<std::int64_t>(own.size());
  return record;
}

TEST("ledger: rounds come in turn, whatever the order of their results") {
  Ledger ledger(kSelf);
  ledger.reset(5, true);
  for (const std::uint64_t round : {6u, 7u, 8u}) ledger.add_record(kNow, record(round, {}));
  ledger.store(kNow, 7, HeapAllocator().allocate(8));
  CHECK_EQ(ledger.have(), std::uint64_t{5});
  CHECK(ledger.next() == nullptr);
  ledger.store(kNow, 6, HeapAllocator().allocate(8));
  CHECK_EQ(ledger.have(), std::uint64_t{7});
  CHECK_EQ(ledger.next()->record.round, std::uint64_t{6});
  CHECK_EQ(ledger.waiting(), std::uint64_t{2});
  CHECK_EQ(ledger.waiting_bytes(), std::size_t{16});
  ledger.set_delivered(6);
  CHECK_EQ(ledger.next()->record.round, std::uint64_t{7});
}

TEST("ledger: a result is kept until it is both applied here and at every member") {
  for (const bool applied_first : {false, true}) {
    Ledger ledger(kSelf);
    ledger.reset(0, true);
    ledger.add_record(kNow, record(1, {}));
    ledger.store(kNow, 1, HeapAllocator().allocate(8));
    applied_first ? ledger.set_delivered(1) : ledger.set_stable(1);
    CHECK(ledger.find(1) != nullptr && ledger.find(1)->kept);
    applied_first ? ledger.set_stable(1) : ledger.set_delivered(1);
    CHECK(ledger.find(1) == nullptr);
    CHECK_EQ(ledger.waiting_bytes(), std::size_t{0});
  }
}

TEST("ledger: a round is written once all of this member's contributions to it are") {
  Ledger ledger(kSelf);
  ledger.reset(0, true);
  const auto progress = std::make_shared<Progress>();
  ledger.add(kNow, HeapAllocator().allocate(8), 2, {});
  ledger.add(kNow, HeapAllocator().allocate(8), 2, {}, 0, progress);
  ledger.add_record(kNow, record(1, {1, 2}));
  const Written written = ledger.inputs(record(1, {1, 2})).written;
  CHECK(written.reaches(0) && !written.reaches(1));
  progress->reach(5);
  CHECK(written.reaches(5) && !written.reaches(6));
  CHECK_EQ(ledger.withdraw(2), std::uint64_t{1});
  CHECK(ledger.withdrew(1));
  ledger.rewind(0);
  CHECK(!ledger.withdrew(1));
  CHECK_EQ(ledger.uncut_batch(), std::int64_t{2});
  ledger.drop_withdrawn();
  CHECK(ledger.own().contains(1) && !ledger.own().contains(2));
}

TEST("ledger: rounds that never were give their contributions back") {
  Ledger ledger(kSelf);
  ledger.reset(0, true);
  for (int i = 0; i < 3; ++i) ledger.add(kNow, HeapAllocator().allocate(8), 2, {});
  ledger.add_record(kNow, record(1, {1}));
  ledger.add_record(kNow, record(2, {2}));
  CHECK_EQ(ledger.uncut_batch(), std::int64_t{2});
  ledger.store(kNow, 1, HeapAllocator().allocate(8));
  ledger.store(kNow, 2, HeapAllocator().allocate(8));
  ledger.rewind(1);
  CHECK_EQ(ledger.have(), std::uint64_t{1});
  CHECK_EQ(ledger.uncut_batch(), std::int64_t{4});
  CHECK(!ledger.knows(2));
  ledger.set_stable(1);
  CHECK(ledger.own().at(1).bucket.empty() && !ledger.own().at(2).bucket.empty());
  ledger.set_delivered(1);
  CHECK(!ledger.own().contains(1));
  CHECK((ledger.drop_own() == std::vector<std::uint64_t>{2, 3}));
}

TEST("ledger: a leader who names a contribution again has no bucket of it") {
  Ledger ledger(kSelf);
  ledger.reset(0, true);
  ledger.add(kNow, HeapAllocator().allocate(8), 2, {});
  ledger.add_record(kNow, record(1, {1}));
  CHECK_EQ(ledger.inputs(record(1, {1})).buckets.size(), std::size_t{1});
  ledger.add_record(kNow, record(2, {1}));
  CHECK(ledger.inputs(record(2, {1})).buckets.empty());
  CHECK_EQ(ledger.own().at(1).round, std::uint64_t{1});
  ledger.store(kNow, 1, HeapAllocator().allocate(8));
  ledger.set_stable(1);  // its bucket is let go, but the user has not applied its round
  ledger.add_record(kNow, record(3, {1}));
  CHECK(ledger.inputs(record(3, {1})).buckets.empty());
  CHECK(ledger.inputs(record(1, {1})).buckets.empty());
}

TEST("ledger: a contribution whose bucket was let go is dropped when its round never was") {
  Ledger ledger(kSelf);
  ledger.reset(0, true);
  ledger.add(kNow, HeapAllocator().allocate(8), 2, {});
  ledger.add_record(kNow, record(1, {1}));
  ledger.add(kNow, {}, 0, {});
  ledger.add_record(kNow, record(2, {2}));
  ledger.set_stable(2);  // a lie: nobody has them
  CHECK((ledger.rewind(0) == std::vector<std::uint64_t>{1}));
  CHECK(ledger.own().contains(2) && ledger.own().at(2).round == 0);  // a skip is offered again
  ledger.add_record(kNow, record(1, {1}));
  CHECK(ledger.inputs(record(1, {1})).buckets.empty());
}

TEST("ledger: a leader who tells of another batch than the member's has no bucket of it") {
  Ledger ledger(kSelf);
  ledger.reset(0, true);
  ledger.add(kNow, {}, 0, {});  // a skip has no bucket
  ledger.add(kNow, HeapAllocator().allocate(8), 3, {});
  const RoundRecord lie = record(1, {1, 2});  // of 2 each
  ledger.add_record(kNow, lie);
  CHECK(ledger.inputs(lie).buckets.empty());
}

TEST("ledger: a newcomer keeps exactly what comes after its snapshot") {
  Ledger ledger(kSelf);
  ledger.reset(3, false);
  for (const std::uint64_t round : {4u, 5u, 6u}) ledger.add_record(kNow, record(round, {}));
  ledger.keep_after(5);
  for (const std::uint64_t round : {4u, 5u, 6u}) {
    ledger.store(kNow, round, HeapAllocator().allocate(8));
  }
  CHECK_EQ(ledger.have(), std::uint64_t{6});
  CHECK_EQ(ledger.waiting(), std::uint64_t{1});
  CHECK_EQ(ledger.next()->record.round, std::uint64_t{6});
  ledger.stop_keeping();
  CHECK(ledger.next() == nullptr);
  CHECK_EQ(ledger.waiting_bytes(), std::size_t{0});
}

TEST("ledger: a round's times begin with this member's last contribution to it") {
  const auto at = [](int second) { return Time{seconds(second)}; };
  Ledger ledger(kSelf);
  ledger.reset(0, true);
  ledger.add(at(1), HeapAllocator().allocate(8), 2, {});
  ledger.add(at(2), HeapAllocator().allocate(8), 2, {});
  ledger.add_record(at(3), record(1, {2, 1}));
  ledger.add_record(at(4), record(2, {}));
  ledger.add_record(at(5), record(1, {2, 1}));  // known already
  ledger.store(at(6), 1, HeapAllocator().allocate(8));
  const RoundTimes& times = ledger.find(1)->times;
  CHECK(times.offered == at(2));
  CHECK(times.cut == at(3));
  CHECK(times.reduced == at(6));
  CHECK(ledger.find(2)->times.offered == kNever);
}

TEST("ledger: a result is the user's or somebody else's to be given, not both") {
  Ledger ledger(kSelf);
  ledger.reset(0, true);
  for (const std::uint64_t round : {1u, 2u, 3u}) ledger.add_record(kNow, record(round, {}));
  ledger.store(kNow, 1, HeapAllocator().allocate(8), true);
  ledger.store(kNow, 2, HeapAllocator().allocate(8), true);
  ledger.store(kNow, 3, HeapAllocator().allocate(8));
  CHECK_EQ(ledger.take(1).size(), std::size_t{8});
  CHECK(ledger.hand_on(1).empty());
  CHECK(ledger.next() != nullptr && ledger.next()->result.empty());  // and still to be applied
  CHECK_EQ(ledger.hand_on(2).size(), std::size_t{8});
  CHECK(ledger.take(2).empty());
  CHECK(ledger.take(3).empty());  // never was this peer's alone
  CHECK_EQ(ledger.waiting_bytes(), std::size_t{16});
}

}  // namespace
