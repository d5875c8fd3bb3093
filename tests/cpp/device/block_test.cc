#include "device/block.h"

#include <sys/stat.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "device/devices.h"
#include "fake_driver.h"

namespace moolink::device {
namespace {

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

TEST("device: blocks beyond what is kept go back to the device") {
  Devices& all = devices();
  const int freed = fake::calls("free");
  std::vector<MutableBuffer> held;
  for (int i = 0; i < 5; ++i) held.push_back(allocate(all, 0, std::size_t{128} << 20));
  held.clear();
  CHECK(fake::calls("free") > freed);
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

}  // namespace
}  // namespace moolink::device
