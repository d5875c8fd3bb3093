#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "conformance.h"
#include "device/block.h"
#include "device/fake_cuda.h"
#include "io/descriptor_passing.h"
#include "memory/lending_pool.h"
#include "shm_subject.h"
#include "transport/shm/segments.h"
#include "transport/shm/transport.h"

namespace moolink::transport {
namespace shm_segments_test {

using conformance::pattern;
using conformance::same_bytes;
using conformance::wait_until;
using memory::LendingPool;
using shm::Access;
using shm::PeerSegments;

// A side that lends.
struct Side : conformance::Side {
  Side() : conformance::Side(shm_subject()) { environment.lending = pool.get(); }

  // Memory of the pool with a pattern in it.
  MutableBuffer filled(std::size_t size, std::uint64_t seed) {
    const MutableBuffer block = pool->allocate(size);
    std::memcpy(block.data(), pattern(size, seed).data(), size);
    return block;
  }
  wire::LoanPlace place_of(const MutableBuffer& block) {
    const auto place = pool->find(block.data(), block.size());
    CHECK(place.has_value());
    return {1, place->segment, place->offset, block.size()};
  }

  std::shared_ptr<LendingPool> pool = std::make_shared<LendingPool>();
};

Descriptor copy_of(const memory::Segment& segment) {
  return Descriptor(::fcntl(segment.descriptor(), F_DUPFD_CLOEXEC, 0));
}

constexpr wire::GrantPlace to_fill(const wire::LoanPlace& place) {
  return {place.loan, place.segment, place.offset, place.bytes};
}

TEST("segments: no place outside of what was passed for that access is believed") {
  PeerSegments theirs;
  const auto segment = memory::Segment::create_to_lend(1 << 16, "moolink-test");
  const auto writable = memory::Segment::create(1 << 16, "moolink-test");
  std::memset(segment->data(), 9, segment->size());
  theirs.add({.access = Access::read, .segment = 4}, copy_of(*segment));
  theirs.add({.access = Access::fill, .segment = 5}, copy_of(*writable));
  const std::uint64_t end = 1 << 16;
  for (const wire::LoanPlace bad :
       {wire::LoanPlace{1, 5, 0, 100}, wire::LoanPlace{1, 4, end - 99, 100},
        wire::LoanPlace{1, 4, end + 1, 0}, wire::LoanPlace{1, 4, ~std::uint64_t{0} - 50, 100},
        wire::LoanPlace{1, 4, 1, ~std::uint64_t{0}},
        wire::LoanPlace{1, 4, std::uint64_t{1} << 63, std::uint64_t{1} << 63}}) {
    CHECK_THROWS(theirs.at(bad, -1), ErrorCode::wire);
    wire::GrantPlace grant = to_fill(bad);
    grant.segment = grant.segment == 4 ? 5 : 4;
    CHECK_THROWS(theirs.at(grant), ErrorCode::wire);
  }
  const Buffer bytes = theirs.at(wire::LoanPlace{1, 4, end - 100, 100}, -1);
  CHECK_EQ(bytes.size(), 100u);
  CHECK_EQ(static_cast<int>(bytes.data()[99]), 9);
  const MutableBuffer room = theirs.at(wire::GrantPlace{1, 5, end - 100, 100});
  room.data()[99] = std::byte{7};
  CHECK_EQ(static_cast<int>(writable->data()[end - 1]), 7);
}

TEST("segments: what is passed twice, retired twice, or cut short is refused") {
  for (const Access access : {Access::fill, Access::read}) {
    PeerSegments theirs;
    const auto segment = memory::Segment::create(1 << 16, "moolink-test");
    const auto add = [&](std::uint64_t number, Descriptor descriptor) {
      theirs.add({.access = access, .segment = number}, std::move(descriptor));
    };
    add(1, copy_of(*segment));
    CHECK_THROWS(add(1, copy_of(*segment)), ErrorCode::wire);
    CHECK_THROWS(add(2, Descriptor()), ErrorCode::wire);
    CHECK_THROWS(theirs.remove({access, 2}), ErrorCode::wire);
    Descriptor unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK_EQ(::ftruncate(unsealed.get(), 1 << 16), 0);
    CHECK_THROWS(add(3, std::move(unsealed)), ErrorCode::wire);
    const Buffer held = access == Access::fill ? Buffer(theirs.at(wire::GrantPlace{1, 1, 0, 100}))
                                               : theirs.at(wire::LoanPlace{1, 1, 0, 100}, -1);
    theirs.remove({access, 1});
    CHECK_THROWS(theirs.at(wire::GrantPlace{1, 1, 0, 100}), ErrorCode::wire);
    CHECK_THROWS(theirs.at(wire::LoanPlace{1, 1, 0, 100}, -1), ErrorCode::wire);
    CHECK_EQ(static_cast<int>(held.data()[0]), 0);  // mapped while a buffer refers to it
  }
}

TEST("segments: too many, and too large ones, are refused") {
  PeerSegments theirs;
  const auto segment = memory::Segment::create(1 << 12, "moolink-test");
  for (std::uint64_t number = 0; number < shm::kMaxSegments; ++number) {
    const Access access = number % 2 == 0 ? Access::fill : Access::read;
    theirs.add({.access = access, .segment = number}, copy_of(*segment));
  }
  const shm::Notice next{.access = Access::read, .segment = shm::kMaxSegments};
  CHECK_THROWS(theirs.add(next, copy_of(*segment)), ErrorCode::wire);
  theirs.remove({Access::fill, 0});
  theirs.add(next, copy_of(*segment));
  theirs.remove({Access::fill, 2});
  const Descriptor large(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(::ftruncate(large.get(), static_cast<off_t>(GrantPool::kLargestBlock + 4096)), 0);
  CHECK_EQ(::fcntl(large.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  Descriptor passed(::fcntl(large.get(), F_DUPFD_CLOEXEC, 0));
  CHECK_THROWS(theirs.add({.access = Access::fill, .segment = 0}, std::move(passed)),
               ErrorCode::wire);
}

struct Sockets {
  Sockets() {
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    ours = Descriptor(ends[0]);
    peer = Descriptor(ends[1]);
  }
  // Returns the notices that have arrived, after `fillers` other messages.
  std::vector<shm::Notice> take(int fillers = 0) {
    std::vector<shm::Notice> notices;
    io::DescriptorMessage message;
    while (io::receive_message(peer.get(), message) == io::Received::message) {
      if (--fillers < 0) notices.push_back(shm::decode_notice(message));
    }
    return notices;
  }
  int fill() {
    int fillers = 0;
    while (::send(ours.get(), "x", 1, 0) == 1) ++fillers;
    return fillers;
  }

  Descriptor ours;
  Descriptor peer;
};

TEST("segments: a full socket takes nothing, and what was not told is told later") {
  const auto pool = std::make_shared<LendingPool>();
  shm::PassedSegments passed(std::make_shared<GrantPool>(), pool.get());
  PeerSegments theirs;
  Sockets sockets;
  const int ours = sockets.ours.get();
  MutableBuffer block = pool->allocate(std::size_t{1} << 30);  // more than is kept
  const std::uint64_t number = pool->find(block.data(), 1)->segment;
  theirs.add({.access = Access::read, .segment = 7}, copy_of(*pool->segment(number)));
  int fillers = sockets.fill();
  CHECK(!passed.pass(ours, shm::to_read(number)));
  theirs.tell_mapped(ours);
  CHECK(sockets.take(fillers).empty());
  CHECK(passed.pass(ours, shm::to_read(number)));
  theirs.tell_mapped(ours);
  theirs.tell_mapped(ours);
  auto notices = sockets.take();
  CHECK_EQ(notices.size(), 2u);
  CHECK(notices.at(0).kind == shm::NoticeKind::pass && notices.at(0).segment == number);
  CHECK(notices.at(1).kind == shm::NoticeKind::mapped && notices.at(1).segment == 7);
  block = {};
  fillers = sockets.fill();
  passed.tell_retired(ours);
  CHECK(passed.changed() && sockets.take(fillers).empty());
  passed.tell_retired(ours);
  notices = sockets.take();
  CHECK(!passed.changed() && notices.size() == 1);
  CHECK(notices.at(0).kind == shm::NoticeKind::retire && notices.at(0).segment == number);
}

TEST("segments: what the system does not map is not said to be mapped; its loans are errors") {
  PeerSegments theirs;
  const auto segment = memory::Segment::create_to_lend(1 << 16, "moolink-test");
  const std::string file = "/proc/self/fd/" + std::to_string(segment->descriptor());
  Descriptor no_reading(::open(file.c_str(), O_WRONLY | O_CLOEXEC));
  CHECK(no_reading);
  theirs.add({.access = Access::read, .segment = 1}, std::move(no_reading));
  CHECK(theirs.bytes(1) == nullptr);
  CHECK_THROWS(theirs.at(wire::LoanPlace{1, 1, 0, 100}, -1), ErrorCode::error);
  Sockets sockets;
  theirs.tell_mapped(sockets.ours.get());
  CHECK(sockets.take().empty());
  theirs.remove({Access::read, 1});
}

TEST("segments: a peer whose segments cannot be mapped does not use up the descriptors") {
  PeerSegments theirs;
  const auto segment = memory::Segment::create_to_lend(1 << 12, "moolink-test");
  const std::string file = "/proc/self/fd/" + std::to_string(segment->descriptor());
  const auto add = [&](std::uint64_t number) {
    theirs.add({.access = Access::read, .segment = number},
               Descriptor(::open(file.c_str(), O_WRONLY | O_CLOEXEC)));
  };
  for (std::uint64_t number = 0; number < 64; ++number) add(number);
  CHECK_THROWS(add(64), ErrorCode::error);
}

TEST("segments: only an answer to what was passed counts, also after it is retired") {
  const auto pool = std::make_shared<LendingPool>();
  shm::PassedSegments passed(std::make_shared<GrantPool>(), pool.get());
  const Sockets sockets;
  const int ours = sockets.ours.get();
  MutableBuffer block = pool->allocate(std::size_t{1} << 30);  // more than is kept
  const std::uint64_t number = pool->find(block.data(), 1)->segment;
  CHECK_THROWS(passed.mapped(number), ErrorCode::wire);
  CHECK(passed.pass(ours, shm::to_read(number)));
  CHECK(!passed.is_mapped(number));
  CHECK_THROWS(passed.mapped(number + 1), ErrorCode::wire);
  passed.mapped(number);
  CHECK(passed.is_mapped(number));
  block = {};
  CHECK(passed.changed());
  passed.tell_retired(ours);
  CHECK(!passed.is_mapped(number));
  passed.mapped(number);  // crossed the notice
  CHECK(!passed.is_mapped(number));
}

TEST("shm: a segment to read is answered once it is mapped") {
  Side lender;
  Side borrower;
  if (!conformance::connect(shm_subject(), lender, borrower)) return;
  const MutableBuffer block = lender.filled(1000, 1);
  const std::uint64_t segment = lender.place_of(block).segment;
  CHECK(lender.connection().pass_segment(segment));
  CHECK(!lender.connection().is_mapped(segment));
  CHECK(borrower.connection().lent_bytes(segment) == nullptr);
  wait_until(lender, borrower, [&] { return lender.connection().is_mapped(segment); });
  LentBytes bytes = borrower.connection().lent_bytes(segment);
  const std::size_t offset = lender.place_of(block).offset;
  CHECK_EQ(std::memcmp(bytes->data() + offset, block.data(), 1000), 0);
  borrower.connection().close();
  wait_until(lender, borrower, [&] { return lender.closures.size() == 1; });
  // The connection object still has the bytes.
  CHECK(borrower.connections.at(0)->lent_bytes(segment) == bytes);
}

TEST("shm: a lent part is the lender's memory, for reading, beyond the connection's end") {
  Side lender;
  Side borrower;
  if (!conformance::connect(shm_subject(), lender, borrower)) return;
  CHECK(lender.connection().traits().loans);
  MutableBuffer small = lender.filled(1000, 1);
  MutableBuffer large = lender.filled(std::size_t{70} << 20, 2);
  for (const MutableBuffer& block : {small, large}) {
    const wire::LoanPlace place = lender.place_of(block);
    CHECK(lender.connection().pass_segment(place.segment));
    CHECK(lender.connection().pass_segment(place.segment));  // passed once
  }
  // The borrower has not turned its loop: it learns of the segments when it needs them.
  const Buffer mapped = borrower.connection().map_loan(lender.place_of(small));
  const Buffer mapped_large = borrower.connection().map_loan(lender.place_of(large));
  CHECK(mapped.data() != small.data());
  CHECK(same_bytes(mapped, pattern(1000, 1)));
  CHECK(same_bytes(mapped_large, large));
  small.data()[3] = std::byte{77};
  CHECK(mapped.data()[3] == std::byte{77});
  lender.connection().close();
  wait_until(lender, borrower, [&] { return borrower.closures.size() == 1; });
  CHECK(same_bytes(mapped, small));
  CHECK(!lender.connection().pass_segment(1));
}

TEST("shm: a segment that is gone is not passed, and the borrower unmaps it") {
  Side lender;
  Side borrower;
  if (!conformance::connect(shm_subject(), lender, borrower)) return;
  borrower.send(conformance::message_frame(1, 10));  // it is ready for any number of segments
  wait_until(lender, borrower, [&] { return lender.frames.size() == 1; });
  std::vector<MutableBuffer> blocks;
  std::vector<wire::LoanPlace> places;
  for (int i = 0; i < 6; ++i) {
    blocks.push_back(lender.pool->allocate(std::size_t{100} << 20));
    places.push_back(lender.place_of(blocks.back()));
    CHECK(lender.connection().pass_segment(places.back().segment));
    CHECK(borrower.connection().map_loan(places.back()).size() == places.back().bytes);
  }
  blocks.clear();  // 2 of 6 are above what is kept
  CHECK_EQ(lender.pool->retired(), 2u);
  lender.turn();
  borrower.turn();
  int known = 0;
  for (const wire::LoanPlace& place : places) {
    known += lender.pool->segment(place.segment) != nullptr ? 1 : 0;
    if (lender.pool->segment(place.segment) != nullptr) continue;
    CHECK(!lender.connection().pass_segment(place.segment));
    CHECK_THROWS(borrower.connection().map_loan(place), ErrorCode::wire);
  }
  CHECK_EQ(known, 4);
  CHECK(!lender.connection().pass_segment(12345));
}

TEST("shm: a peer that may not be ready is lent a few segments only") {
  Side lender;
  Side borrower;
  borrower.establish_on_open = false;
  if (!conformance::connect(shm_subject(), lender, borrower)) return;
  std::vector<MutableBuffer> blocks;
  int passed = 0;
  for (int i = 0; i < 40; ++i) {
    blocks.push_back(lender.pool->allocate(LendingPool::kSegmentBytes));
    passed += lender.connection().pass_segment(lender.place_of(blocks.back()).segment) ? 1 : 0;
  }
  CHECK(passed > 0 && passed < 4);  // the limit before the peer's first frame
  borrower.turn();
  CHECK(borrower.closures.empty());
  borrower.connection().establish();
  borrower.send(conformance::message_frame(1, 10));
  wait_until(lender, borrower, [&] { return lender.frames.size() == 1; });
  for (const MutableBuffer& block : blocks) {
    CHECK(lender.connection().pass_segment(lender.place_of(block).segment));
    CHECK(borrower.connection().map_loan(lender.place_of(block)).size() == block.size());
  }
}

// Says that this process receives on the device, and waits until both sides know it.
bool tell_that_it_receives(Side& lender, Side& borrower, int device) {
  device::Devices& devices = device::fake::load();
  CHECK_EQ(devices.receives(device), "");
  borrower.send(conformance::message_frame(1, 10));
  lender.send(conformance::message_frame(1, 10));
  return wait_until(lender, borrower, [&] { return lender.connection().reads_device(device); });
}

TEST("shm: a block of a device is lent to a peer that receives there, beyond the connection") {
  Side lender;
  Side borrower;
  if (!conformance::connect(shm_subject(), lender, borrower)) return;
  CHECK(!lender.connection().reads_device(1));
  if (!tell_that_it_receives(lender, borrower, 1)) return;
  CHECK(!lender.connection().reads_device(0));
  const Buffer expected = pattern(3'000'000, 5);
  Buffer block = device::fake::on_device(expected, 1);
  std::optional<device::Place> found = device::place_of(block);
  CHECK(found.has_value());
  const std::uint64_t segment = found->block | wire::kDeviceSegments;
  const wire::LoanPlace place{1, segment, 1000, 2'000'000};
  CHECK(lender.connection().pass_segment(segment));
  CHECK(lender.connection().pass_segment(segment));
  const Buffer mapped = borrower.connection().map_loan(place);
  CHECK(device::block_of(mapped) != nullptr && mapped.data() != block.data() + 1000);
  HeapAllocator heap;
  CHECK(same_bytes(device::copy_to_host(mapped, heap), expected.slice(1000, 2'000'000)));
  for (const wire::LoanPlace bad :
       {wire::LoanPlace{1, segment + 1, 0, 10}, wire::LoanPlace{1, segment, 1u << 30, 10},
        wire::LoanPlace{1, segment, 10, ~std::uint64_t{0}}}) {
    CHECK_THROWS(borrower.connection().map_loan(bad), ErrorCode::wire);
  }
  // Freed by its lender, it is taken back, and stays what it was where it is mapped.
  found->lent->store(true);
  found->lent.reset();
  block = {};
  device::fake::on_device(expected, 1);  // the next capture frees it
  lender.turn();
  borrower.turn();
  CHECK_THROWS(borrower.connection().map_loan(place), ErrorCode::wire);
  lender.connection().close();
  wait_until(lender, borrower, [&] { return borrower.closures.size() == 1; });
  CHECK(same_bytes(device::copy_to_host(mapped, heap), expected.slice(1000, 2'000'000)));
}

TEST("shm: a block that CUDA does not map is an error, once: its lender hears of it") {
  Side lender;
  Side borrower;
  if (!conformance::connect(shm_subject(), lender, borrower)) return;
  if (!tell_that_it_receives(lender, borrower, 0)) return;
  const Buffer block = device::fake::on_device(pattern(3'000'000, 5), 0);
  const std::uint64_t segment = device::place_of(block)->block | wire::kDeviceSegments;
  CHECK(lender.connection().pass_segment(segment));
  device::fake::fail_next("memory_import", 2, 1);
  CHECK_THROWS(borrower.connection().map_loan({1, segment, 0, 100}), ErrorCode::error);
  CHECK_EQ(borrower.connection().map_loan({1, segment, 0, 100}).size(), 100u);  // by a later one
  wait_until(lender, borrower, [&] { return !lender.connection().reads_device(0); });
}

TEST("shm: blocks of a device are not lent any more once CUDA does not share one") {
  Side lender;
  Side borrower;
  if (!conformance::connect(shm_subject(), lender, borrower)) return;
  if (!tell_that_it_receives(lender, borrower, 1)) return;
  const Buffer block = device::fake::on_device(pattern(3'000'000, 5), 1);
  const std::uint64_t segment = device::place_of(block)->block | wire::kDeviceSegments;
  device::fake::fail_next("memory_export", 801, 1);
  CHECK(!lender.connection().pass_segment(segment));
  CHECK(!lender.connection().reads_device(1));
}

TEST("segments: blocks are taken only of devices on which this side receives") {
  device::fake::load();
  PeerSegments theirs;
  const shm::Notice notice{.access = Access::block,
                           .segment = wire::kDeviceSegments | 1,
                           .key = Uid{1, 2},
                           .bytes = 1 << 21};
  CHECK_THROWS(theirs.add(notice, Descriptor()), ErrorCode::wire);
}

}  // namespace shm_segments_test
}  // namespace moolink::transport
