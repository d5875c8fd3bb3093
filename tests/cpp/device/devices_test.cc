#include "device/devices.h"

#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_driver.h"

namespace moolink::device {
namespace devices_test {

constexpr StagingOptions kSmall{.slot_bytes = 4096, .most_slots = 3};

std::vector<std::byte> numbered(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

// What a test needs; never destroyed, as in a process.
Devices& devices(StagingOptions options = kSmall) {
  static const Driver& driver = *new Driver(fake::driver());
  return *new Devices(driver, options);
}

TEST("device: bytes come to the host, whatever their number and size") {
  Devices& all = devices();
  const auto stream = all.stream(0);
  for (const std::size_t size : {0, 1, 63, 4096, 4097, 12288, 50000, 100001}) {
    const std::vector<std::byte> from = numbered(size);
    std::vector<std::byte> to(size);
    const Transfer transfer{from.data(), to.data(), size};
    stream->copy_to_host({&transfer, 1});
    CHECK(to == from);
    std::vector<std::byte> back(size);
    const Transfer other{to.data(), back.data(), size};
    stream->copy_to_device({&other, 1});
    CHECK(back == from);
  }
  CHECK(all.counters().pinned_bytes <= kSmall.slot_bytes * kSmall.most_slots);
  CHECK_EQ(all.counters().bytes_to_host, all.counters().bytes_to_device);
}

TEST("device: small tensors share a transfer") {
  Devices& all = devices();
  const auto stream = all.stream(1);
  const std::vector<std::byte> from = numbered(5000);
  std::vector<std::byte> to(5000);
  std::vector<Transfer> transfers;
  for (std::size_t at = 0; at < from.size(); at += 50) {
    transfers.push_back({from.data() + at, to.data() + at, 50});
  }
  const int before = fake::calls("event_record");
  stream->copy_to_host(transfers);
  CHECK(to == from);
  CHECK_EQ(fake::calls("event_record") - before, 2);  // 100 pieces of 64 bytes: two slots
}

TEST("device: a copy comes after what its producer has queued") {
  Devices& all = devices();
  const StreamHandle producer = fake::new_stream();
  for (const StreamHandle queued_on : {producer, StreamHandle{nullptr}}) {
    std::vector<std::byte> from(10000);
    std::vector<std::byte> to(10000);
    fake::enqueue(queued_on, [&] { std::memcpy(from.data(), numbered(10000).data(), 10000); });
    const auto stream = all.stream(0);
    stream->follow(queued_on);
    const Transfer transfer{from.data(), to.data(), to.size()};
    stream->copy_to_host({&transfer, 1});
    CHECK(to == numbered(10000));
  }
}

TEST("device: a thread has one stream a device while it holds it; others have their own") {
  Devices& all = devices();
  auto mine = all.stream(0);
  CHECK(all.stream(0) == mine);
  CHECK(all.stream(1) != mine);
  std::shared_ptr<Stream> other;
  std::thread([&] { other = all.stream(0); }).join();
  CHECK(other != mine);
  const std::uintptr_t handle = other->handle();
  other.reset();
  const int made = fake::calls("stream_create");
  std::thread([&] { CHECK_EQ(all.stream(0)->handle(), handle); }).join();
  CHECK_EQ(fake::calls("stream_create"), made);
}

TEST("device: an error names CUDA's and the device, and what is staged is usable afterwards") {
  Devices& all = devices();
  const auto stream = all.stream(1);
  const std::vector<std::byte> from = numbered(30000);
  std::vector<std::byte> to(30000);
  const Transfer transfer{from.data(), to.data(), from.size()};
  for (const char* function : {"copy", "event_record", "event_synchronize"}) {
    for (int round = 0; round < 5; ++round) {  // more often than there are slots
      fake::fail_next(function, 2);
      try {
        stream->copy_to_host({&transfer, 1});
        CHECK(false);
      } catch (const Exception& e) {
        const std::string& text = e.error().message;
        CHECK(text.find("CUDA_ERROR_OUT_OF_MEMORY (out of memory)") != std::string::npos);
        CHECK(text.find("cuda:1") != std::string::npos);
      }
    }
  }
  stream->copy_to_host({&transfer, 1});
  CHECK(to == from);
  CHECK_THROWS(all.stream(2), ErrorCode::error);
  CHECK_THROWS(all.stream(-1), ErrorCode::error);
}

TEST("device: without pinned memory the driver copies itself") {
  Devices& all = devices();
  const auto stream = all.stream(0);
  const std::vector<std::byte> from = numbered(30000);
  std::vector<std::byte> to(30000);
  const Transfer transfer{from.data(), to.data(), from.size()};
  fake::fail_next("host_allocate", 2);
  stream->copy_to_host({&transfer, 1});
  CHECK(to == from);
  CHECK_EQ(all.counters().pinned_bytes, 0U);
}

TEST("device: many threads share the pinned slots") {
  Devices& all = devices();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&all, i] {
      const std::vector<std::byte> from = numbered(static_cast<std::size_t>(20000 + i));
      for (int round = 0; round < 20; ++round) {
        std::vector<std::byte> to(from.size());
        const Transfer transfer{from.data(), to.data(), from.size()};
        all.stream(i % 2)->copy_to_host({&transfer, 1});
        CHECK(to == from);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(all.counters().pinned_bytes <= kSmall.slot_bytes * kSmall.most_slots);
}

}  // namespace devices_test
}  // namespace moolink::device
