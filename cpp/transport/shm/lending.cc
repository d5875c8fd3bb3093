#include "transport/shm/lending.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/barrier.h"
#include "base/error.h"
#include "transport/shm/notice.h"
#include "wire/payload.h"

namespace moolink::transport::shm {
namespace {

constexpr std::size_t kMostDevices = 64;
constexpr std::size_t kMostPassed = 8192;  // below what a borrower takes

bool is_block(std::uint64_t number) { return (number & wire::kDeviceSegments) != 0; }

std::shared_ptr<const device::Block> block_of(std::uint64_t number) {
  return device::block_numbered(number & ~wire::kDeviceSegments);
}

void check_place(const wire::LoanPlace& place, std::size_t size) {
  if (place.offset <= size && place.bytes <= size - place.offset) return;
  throw Exception(ErrorCode::wire, "a loan of " + std::to_string(place.bytes) + " bytes at " +
                                       std::to_string(place.offset) +
                                       " is not within its segment of " + std::to_string(size) +
                                       " bytes");
}

}  // namespace

// --- the lender

bool LentSegments::pass(int socket, std::uint64_t number, std::size_t most) {
  if (passed_.contains(number)) return true;
  if (passed_.size() >= std::min(most, kMostPassed)) return false;
  if (is_block(number)) {
    if (!pass_block(socket, number)) return false;
  } else {
    const auto segment = pool_ == nullptr ? nullptr : pool_->segment(number);
    if (segment == nullptr) return false;
    const int descriptor = segment->descriptor();
    const Notice lend{.kind = NoticeKind::lend, .segment = number};
    if (!try_send_notice(socket, lend, {&descriptor, 1})) return false;
  }
  passed_.insert(number);
  return true;
}

bool LentSegments::pass_block(int socket, std::uint64_t number) const {
  const std::shared_ptr<const device::Block> block = block_of(number);
  if (block == nullptr || !may_lend_of(block->device())) return false;
  Descriptor shared;
  const auto share = [&] { shared = block->share(); };
  const auto refuse = [&](const Error& error) {
    device::Devices::process().refuse_sharing(block->device(), error.message);
  };
  if (!guard(share, refuse)) return false;  // the bytes go through the host's memory
  const int descriptor = shared.get();
  const Notice lend{.kind = NoticeKind::lend_of_device,
                    .segment = number,
                    .key = block->device_uid(),
                    .bytes = block->bytes()};
  return try_send_notice(socket, lend, {&descriptor, 1});
}

void LentSegments::peer_receives(const Uid& device) {
  devices_.insert(device);
  if (devices_.size() > kMostDevices) {
    throw Exception(ErrorCode::wire, "a peer receives on more devices than a machine has");
  }
}

bool LentSegments::may_lend_of(int device) const {
  device::Devices* devices = device::Devices::process_if_used();
  return !devices_.empty() && devices != nullptr && devices->shares(device) &&
         devices_.contains(devices->uid(device));
}

bool LentSegments::is_there(std::uint64_t number) const {
  return is_block(number) ? block_of(number) != nullptr : pool_->segment(number) != nullptr;
}

std::uint64_t LentSegments::retired() const {
  return device::blocks_gone() + (pool_ == nullptr ? 0 : pool_->retired());
}

void LentSegments::tell_retired(int socket) {
  const std::uint64_t seen = retired();
  for (auto passed = passed_.begin(); passed != passed_.end();) {
    if (is_there(*passed)) {
      ++passed;
      continue;
    }
    const Notice unlend{.kind = NoticeKind::unlend, .segment = *passed};
    if (!try_send_notice(socket, unlend, {})) return;
    passed = passed_.erase(passed);
  }
  seen_ = seen;
}

// --- the borrower

void BorrowedSegments::insert(std::uint64_t number, Segment segment) {
  if (segments_.size() >= kMaxSegments || !segments_.emplace(number, std::move(segment)).second) {
    throw Exception(ErrorCode::wire, "a peer lent segment " + std::to_string(number) +
                                         " twice, or more segments than are allowed");
  }
}

void BorrowedSegments::add(std::uint64_t number, Descriptor descriptor) {
  insert(number,
         memory::BorrowedSegment::map(std::move(descriptor), memory::LendingPool::kLargestBlock));
}

void BorrowedSegments::add_block(std::uint64_t number, const Uid& device, std::uint64_t bytes,
                                 Descriptor descriptor) {
  device::Devices* devices = device::Devices::process_if_used();
  const std::optional<int> here = devices == nullptr ? std::nullopt : devices->find(device);
  if (!here || bytes > memory::LendingPool::kLargestBlock) {
    throw Exception(ErrorCode::wire,
                    "a peer lent memory of a device on which nothing is received here, or more "
                    "than a device has");
  }
  insert(number, SharedBlock{*here, bytes, std::move(descriptor), nullptr});
}

void BorrowedSegments::remove(std::uint64_t number) {
  if (segments_.erase(number) == 0) {
    throw Exception(ErrorCode::wire,
                    "a peer took back segment " + std::to_string(number) + ", which it never lent");
  }
}

Buffer BorrowedSegments::at(const wire::LoanPlace& place, int socket) {
  const auto found = segments_.find(place.segment);
  if (found == segments_.end()) {
    throw Exception(ErrorCode::wire, "a loan lies in segment " + std::to_string(place.segment) +
                                         ", which the peer never lent");
  }
  if (auto* shared = std::get_if<SharedBlock>(&found->second)) map(*shared, socket);
  return std::visit([&](auto& segment) { return buffer(segment, place); }, found->second);
}

Buffer BorrowedSegments::buffer(std::shared_ptr<memory::BorrowedSegment>& segment,
                                const wire::LoanPlace& place) {
  if (auto next = segment->successor()) segment = std::move(next);
  check_place(place, segment->size());
  return segment->buffer(place.offset, static_cast<std::size_t>(place.bytes));
}

Buffer BorrowedSegments::buffer(SharedBlock& shared, const wire::LoanPlace& place) {
  check_place(place, shared.bytes);
  return {shared.block, shared.block->data() + place.offset, static_cast<std::size_t>(place.bytes)};
}

void BorrowedSegments::map(SharedBlock& shared, int socket) {
  if (shared.block != nullptr) return;
  device::Devices& devices = device::Devices::process();
  try {
    shared.block = device::Block::map(devices, shared.device, shared.descriptor, shared.bytes);
    shared.descriptor.reset();
  } catch (const Exception& e) {
    devices.refuse_sharing(shared.device, e.error().message);
    try_send_notice(socket, {.kind = NoticeKind::refuses, .key = devices.uid(shared.device)}, {});
    throw;
  }
}

void BorrowedSegments::tell_devices(int socket) {
  device::Devices* devices = device::Devices::process_if_used();
  std::uint64_t untold = devices == nullptr ? 0 : devices->receiving() & ~told_;
  while (untold != 0) {
    const int device = std::countr_zero(untold);
    const Notice receives{.kind = NoticeKind::receives, .key = devices->uid(device)};
    if (!try_send_notice(socket, receives, {})) return;
    told_ |= std::uint64_t{1} << device;
    untold &= untold - 1;
  }
}

}  // namespace moolink::transport::shm
