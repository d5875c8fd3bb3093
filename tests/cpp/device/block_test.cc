#include "device/block.h"

#include <sys/stat.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "device/devices.h"
#include "fake_driver.h"

namespace moolink::device {
namespace block_test {

constexpr Status kNotSupported = 801;

// What a test needs; never destroyed, as in a process.
Devices& devices() {
  static const Driver& driver = *new Driver(fake::driver());
  return *new Devices(driver);
}

TEST("device: a block is the same one for all messages that have it in turn") {
  Devices& all = devices();
  MutableBuffer first = allocate(all, 1, 300'000);
  const std::weak_ptr<const Block> block = block_of(first);
  CHECK(block.lock() != nullptr);
  CHECK_EQ(block.lock()->device(), 1);
  CHECK(block.lock()->data() == first.data());
  CHECK(block_of(Buffer(first).slice(5000, 10)) == block.lock());
  CHECK(block_of(allocate(all, 1, 300'000)) != block.lock());
  CHECK(block_of(allocate(all, 0, 300'000)) != block.lock());
  first = {};
  CHECK(block.lock() != nullptr);
  // The one that was given back last, of its device and size.
  CHECK(block_of(allocate(all, 1, 400'000)) == block.lock());
  CHECK(block_of(HeapAllocator().allocate(100)) == nullptr);
  CHECK(block_of(Buffer()) == nullptr);
}

TEST("device: what is more than is kept goes with the next capture, the longest unused first") {
  Devices& all = devices();
  constexpr std::size_t kLarge = std::size_t{128} << 20;
  std::vector<MutableBuffer> held;
  for (int i = 0; i < 6; ++i) held.push_back(allocate(all, 0, kLarge));
  const std::weak_ptr<const Block> oldest = block_of(held.front());
  const std::weak_ptr<const Block> latest = block_of(held.back());
  const int freed = fake::calls("free");
  for (MutableBuffer& memory : held) memory = {};
  CHECK_EQ(fake::calls("free"), freed);  // whoever let go of it may be in a hurry
  CHECK(block_of(allocate(all, 0, 2 * kLarge)) != nullptr);
  CHECK(fake::calls("free") >= freed + 2);
  CHECK(oldest.expired() && !latest.expired());
}

TEST("device: what a failed capture has queued is over before its block is another message's") {
  Devices& all = devices();
  const std::vector<std::byte> old(300'000, std::byte{1});
  const std::vector<std::byte> mine(300'000, std::byte{2});
  const auto failing = all.stream(0);
  MutableBuffer first = allocate(all, 0, old.size());
  const std::byte* at = first.data();
  const Transfer queued{old.data(), first.data(), old.size()};
  fake::fail_next("event_record", 2);
  CHECK_THROWS(failing->copy_within_device({&queued, 1}), ErrorCode::error);
  first = {};
  const MutableBuffer second = allocate(all, 0, mine.size());
  CHECK(second.data() == at);
  const Transfer next{mine.data(), second.data(), mine.size()};
  std::thread([&] { all.stream(0)->copy_within_device({&next, 1}); }).join();
  HeapAllocator heap;
  const Buffer host = copy_to_host(second, heap);  // by the stream that failed
  CHECK(std::memcmp(host.data(), mine.data(), mine.size()) == 0);
}

TEST("device: bytes captured on a device come to the host") {
  Devices& all = devices();
  std::vector<std::byte> from(3'000'001);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 251);
  const MutableBuffer captured = allocate(all, 0, from.size());
  const Transfer transfer{from.data(), captured.data(), from.size()};
  all.stream(0)->copy_within_device({&transfer, 1});
  CHECK_EQ(all.counters().bytes_within_device, std::uint64_t{from.size()});
  HeapAllocator heap;
  const Buffer part = Buffer(captured).slice(1000, 2'000'000);
  const Buffer host = copy_to_host(part, heap);
  CHECK(block_of(host) == nullptr);
  CHECK(std::memcmp(host.data(), from.data() + 1000, host.size()) == 0);
}

TEST("device: a block is exported whole, or CUDA's reason is told") {
  Devices& all = devices();
  const MutableBuffer memory = allocate(all, 1, 5'000'000);
  const Descriptor dmabuf = block_of(memory)->export_dmabuf();
  struct stat status{};
  CHECK_EQ(fstat(dmabuf.get(), &status), 0);
  CHECK_EQ(static_cast<std::size_t>(status.st_size), block_of(memory)->bytes());
  fake::fail_next("range_handle", kNotSupported);
  std::string told;
  try {
    block_of(memory)->export_dmabuf();
  } catch (const Exception& e) {
    told = e.error().message;
  }
  CHECK(told.find("dmabuf") != std::string::npos && told.find("cuda:1") != std::string::npos);
  fake::fail_next("allocate", 2);
  CHECK_THROWS(allocate(all, 1, std::size_t{1} << 30), ErrorCode::error);
}

// A process that shares its memory, and its memory with a pattern in it.
Devices& sharing() {
  static const Driver& driver = *new Driver(fake::driver());
  return *new Devices(driver, {}, true);
}

Buffer filled(Devices& all, int device, std::size_t size, int seed) {
  std::vector<std::byte> from(size);
  for (std::size_t i = 0; i < size; ++i) from[i] = static_cast<std::byte>(i * 7 + i / 251 + seed);
  const MutableBuffer memory = allocate(all, device, size);
  const Transfer transfer{from.data(), memory.data(), size};
  all.stream(device)->copy_to_device({&transfer, 1});
  return memory;
}

bool same_bytes(const Buffer& a, const Buffer& b) {
  HeapAllocator heap;
  const Buffer left = copy_to_host(a, heap);
  const Buffer right = copy_to_host(b, heap);
  return left.size() == right.size() && std::memcmp(left.data(), right.data(), left.size()) == 0;
}

TEST("device: a shared block is mapped elsewhere, and outlives its maker") {
  Devices& maker = sharing();
  Devices& other = sharing();
  CHECK_EQ(maker.sharing_refusal(1), "");
  Buffer made = filled(maker, 1, 3'000'000, 1);
  std::optional<Place> place = place_of(made);
  CHECK(place && place->block != 0 && place->offset == 0);
  CHECK_EQ(place_of(made.slice(100, 5))->offset, std::size_t{100});
  CHECK(block_numbered(place->block) == block_of(made));
  std::shared_ptr<const Block> own = block_of(made);
  std::shared_ptr<const Block> mapped = Block::map(other, 1, own->share(), own->bytes());
  CHECK(mapped->data() != own->data());
  CHECK_EQ(mapped->number(), 0u);  // its maker shares it, nobody else
  const Buffer seen(mapped, mapped->data(), made.size());
  CHECK(block_of(seen) == mapped && !place_of(seen));
  CHECK(same_bytes(seen, made));
  const Buffer again = filled(maker, 1, 3'000'000, 1);
  const std::uint64_t gone = blocks_gone();
  place->lent->store(true);
  std::weak_ptr<const Block> watch = own;
  own.reset();
  made = {};
  place->lent.reset();
  CHECK(!watch.expired());  // whoever let go of it may be in a hurry
  CHECK(block_of(filled(maker, 1, 3'000'000, 2)) != watch.lock());  // it may still be read
  CHECK(watch.expired());
  CHECK_EQ(blocks_gone(), gone + 1);
  CHECK(block_numbered(place->block) == nullptr);
  CHECK(same_bytes(seen, again));
}

TEST("device: where memory cannot be shared, blocks are of the old kind") {
  Devices& unasked = devices();
  CHECK(unasked.sharing_refusal(0).find("MOOLINK_CUDA_IPC") != std::string::npos);
  CHECK(!place_of(allocate(unasked, 0, 300'000)));
  CHECK_EQ(unasked.receives(0), "");
  CHECK_EQ(unasked.receiving(), 0u);
  for (const char* function : {"memory_create", "memory_export", "memory_import", "set_access"}) {
    Devices& all = sharing();
    fake::fail_next(function, kNotSupported, 3);
    for (int i = 0; i < 3; ++i) CHECK(all.receives(1).find("cuda:1") != std::string::npos);
    fake::fail_next(function, kSuccess, 0);
    CHECK_EQ(all.receiving(), 0u);
    CHECK(!place_of(filled(all, 1, 300'000, 0)));
  }
  Driver& old = *new Driver(fake::driver());
  old.memory_import = nullptr;
  CHECK(!place_of(allocate(*new Devices(old, {}, true), 0, 300'000)));
}

TEST("device: devices are known by their UUIDs once something is received on them") {
  Devices& all = sharing();
  CHECK(!all.find(all.uid(1)));
  CHECK_EQ(all.receives(1), "");
  CHECK_EQ(all.receiving(), 2u);
  CHECK_EQ(all.find(all.uid(1)).value(), 1);
  CHECK(!all.find(all.uid(0)) && !all.find(Uid{1, 2}));
}

TEST("device: a driver that is too old for dmabufs serves for all else") {
  Driver& old = *new Driver(fake::driver());
  old.range_handle = nullptr;
  Devices& all = *new Devices(old);
  const MutableBuffer memory = allocate(all, 0, 300'000);
  CHECK_THROWS(block_of(memory)->export_dmabuf(), ErrorCode::error);
  const std::vector<std::byte> from(memory.size(), std::byte{5});
  const Transfer transfer{from.data(), memory.data(), from.size()};
  all.stream(0)->copy_within_device({&transfer, 1});
  HeapAllocator heap;
  CHECK(std::memcmp(copy_to_host(memory, heap).data(), from.data(), from.size()) == 0);
}

}  // namespace block_test
}  // namespace moolink::device
