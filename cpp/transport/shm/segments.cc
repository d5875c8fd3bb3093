#include "transport/shm/segments.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <utility>

#include "base/barrier.h"
#include "base/error.h"
#include "device/devices.h"

namespace moolink::transport::shm {
namespace {

constexpr std::size_t kMostDevices = 64;
constexpr std::ptrdiff_t kMostUnmapped = 64;  // each keeps its descriptor

std::shared_ptr<const device::Block> block_of(std::uint64_t number) {
  return device::block_numbered(number & ~wire::kDeviceSegments);
}

[[noreturn]] void refuse(const std::string& why) {
  throw Exception(ErrorCode::wire, "a peer's memory: " + why);
}

[[noreturn]] void refuse(const char* why, std::uint64_t number) {
  refuse("segment " + std::to_string(number) + " " + why);
}

template <class Place>
void check_place(const Place& place, std::size_t size) {
  if (place.offset <= size && place.bytes <= size - place.offset) return;
  refuse(std::to_string(place.bytes) + " bytes at " + std::to_string(place.offset) +
         " are not within their segment of " + std::to_string(size) + " bytes");
}

}  // namespace

// --- the owner

std::shared_ptr<memory::Segment> PassedSegments::find(SegmentId segment) const {
  if (segment.access == Access::fill) return grants_->segment(segment.number);
  return lending_ == nullptr ? nullptr : lending_->segment(segment.number);
}

bool PassedSegments::pass(int socket, SegmentId segment, std::size_t most) {
  if (passed_.contains(segment)) return true;
  if (passed_.size() >= std::min(most, kMaxSegments)) return false;
  if (segment.access == Access::block) {
    if (!pass_block(socket, segment.number)) return false;
  } else {
    const auto memory = find(segment);
    if (memory == nullptr) return false;
    const int descriptor = memory->descriptor();
    const Notice pass{
        .kind = NoticeKind::pass, .access = segment.access, .segment = segment.number};
    if (!try_send_notice(socket, pass, {&descriptor, 1})) return false;
    if (segment.access == Access::fill) memory->close_descriptor();  // for this peer alone
  }
  passed_.emplace(segment, false);
  if (segment.access == Access::read) {
    highest_to_read_ = std::max(highest_to_read_, segment.number);
  }
  return true;
}

bool PassedSegments::pass_block(int socket, std::uint64_t number) const {
  const std::shared_ptr<const device::Block> block = block_of(number);
  if (block == nullptr || !may_lend_of(block->device())) return false;
  Descriptor shared;
  const auto share = [&] { shared = block->share(); };
  const auto share_no_more = [&](const Error& error) {
    device::Devices::process().refuse_sharing(block->device(), error.message);
  };
  if (!guard(share, share_no_more)) return false;  // the bytes go through the host's memory
  const int descriptor = shared.get();
  const Notice pass{.kind = NoticeKind::pass,
                    .access = Access::block,
                    .segment = number,
                    .key = block->device_uid(),
                    .bytes = block->bytes()};
  return try_send_notice(socket, pass, {&descriptor, 1});
}

// The answer may arrive after this side has retired the segment.
void PassedSegments::mapped(std::uint64_t number) {
  if (number > highest_to_read_) refuse("is mapped, but was never passed", number);
  const auto found = passed_.find({Access::read, number});
  if (found != passed_.end()) found->second = true;
}

bool PassedSegments::is_mapped(std::uint64_t number) const {
  const auto found = passed_.find({Access::read, number});
  return found != passed_.end() && found->second;
}

bool PassedSegments::is_there(SegmentId segment) const {
  return segment.access == Access::block ? block_of(segment.number) != nullptr
                                         : find(segment) != nullptr;
}

std::uint64_t PassedSegments::retired() const {
  return grants_->retired() + device::blocks_gone() +
         (lending_ == nullptr ? 0 : lending_->retired());
}

void PassedSegments::tell_retired(int socket) {
  const std::uint64_t seen = retired();
  for (auto passed = passed_.begin(); passed != passed_.end();) {
    const SegmentId segment = passed->first;
    if (is_there(segment)) {
      ++passed;
      continue;
    }
    const Notice retire{
        .kind = NoticeKind::retire, .access = segment.access, .segment = segment.number};
    if (!try_send_notice(socket, retire, {})) return;
    passed = passed_.erase(passed);
  }
  seen_ = seen;
}

void PassedSegments::peer_receives(const Uid& device) {
  devices_.insert(device);
  if (devices_.size() > kMostDevices) refuse("it names more than 64 devices");
}

bool PassedSegments::may_lend_of(int device) const {
  device::Devices* devices = device::Devices::process_if_used();
  return !devices_.empty() && devices != nullptr && devices->shares(device) &&
         devices_.contains(devices->uid(device));
}

// --- the other side

void PeerSegments::add(const Notice& notice, Descriptor descriptor) {
  const SegmentId id{notice.access, notice.segment};
  if (segments_.size() >= kMaxSegments || segments_.contains(id)) {
    refuse("is passed already, or too many are passed", id.number);
  }
  Segment segment = id.access == Access::block ? block(notice) : Segment{};
  segment.descriptor = std::move(descriptor);
  if (id.access == Access::fill) {
    segment.to_fill = memory::Segment::map(segment.descriptor, GrantPool::kLargestBlock);
    segment.descriptor.reset();
  } else if (id.access == Access::read) {
    try {
      map_to_read(id.number, segment);
    } catch (const Exception& e) {
      const auto is_unmapped = [](const auto& entry) {
        return entry.first.access == Access::read && entry.second.to_read == nullptr;
      };
      const auto unmapped = std::ranges::count_if(segments_, is_unmapped);
      if (e.error().code == ErrorCode::wire || unmapped >= kMostUnmapped) throw;
    }
  }
  segments_.emplace(id, std::move(segment));
}

PeerSegments::Segment PeerSegments::block(const Notice& notice) {
  device::Devices* devices = device::Devices::process_if_used();
  const std::optional<int> here = devices == nullptr ? std::nullopt : devices->find(notice.key);
  if (!here || notice.bytes > memory::LendingPool::kLargestBlock) {
    refuse("the block is too large, or of a device on which this process receives no arrays");
  }
  return {.device = *here, .bytes = notice.bytes};
}

void PeerSegments::remove(SegmentId segment) {
  if (segments_.erase(segment) == 0) refuse("is retired, but was never passed", segment.number);
  if (segment.access == Access::read) std::erase(untold_, segment.number);
}

MutableBuffer PeerSegments::at(const wire::GrantPlace& place) const {
  const auto found = segments_.find({Access::fill, place.segment});
  if (found == segments_.end()) refuse("of a grant was never passed", place.segment);
  const std::shared_ptr<memory::Segment>& segment = found->second.to_fill;
  check_place(place, segment->size());
  return segment->buffer(place.offset, static_cast<std::size_t>(place.bytes));
}

Buffer PeerSegments::at(const wire::LoanPlace& place, int socket) {
  const SegmentId id = to_read(place.segment);
  const auto found = segments_.find(id);
  if (found == segments_.end()) refuse("of a loan was never passed", place.segment);
  Segment& segment = found->second;
  const auto bytes = static_cast<std::size_t>(place.bytes);
  if (id.access == Access::block) {
    map_block(segment, socket);
    check_place(place, segment.bytes);
    return {segment.block, segment.block->data() + place.offset, bytes};
  }
  if (segment.to_read == nullptr) map_to_read(id.number, segment);
  check_place(place, segment.to_read->bytes()->size());
  return segment.to_read->buffer(place.offset, bytes);
}

LentBytes PeerSegments::bytes(std::uint64_t number) const {
  const auto found = segments_.find({Access::read, number});
  if (found == segments_.end() || found->second.to_read == nullptr) return nullptr;
  return found->second.to_read->bytes();
}

void PeerSegments::map_to_read(std::uint64_t number, Segment& segment) {
  segment.to_read =
      memory::BorrowedSegment::map(segment.descriptor, memory::LendingPool::kLargestBlock);
  segment.descriptor.reset();
  untold_.push_back(number);
}

void PeerSegments::map_block(Segment& segment, int socket) {
  if (segment.block != nullptr) return;
  device::Devices& devices = device::Devices::process();
  try {
    segment.block = device::Block::map(devices, segment.device, segment.descriptor, segment.bytes);
    segment.descriptor.reset();
  } catch (const Exception& e) {
    devices.refuse_sharing(segment.device, e.error().message);
    try_send_notice(socket, {.kind = NoticeKind::refuses, .key = devices.uid(segment.device)}, {});
    throw;
  }
}

void PeerSegments::tell_mapped(int socket) {
  while (!untold_.empty() &&
         try_send_notice(socket, {.kind = NoticeKind::mapped, .segment = untold_.back()}, {})) {
    untold_.pop_back();
  }
}

void PeerSegments::tell_devices(int socket) {
  device::Devices* devices = device::Devices::process_if_used();
  std::uint64_t untold = devices == nullptr ? 0 : devices->receiving() & ~told_devices_;
  while (untold != 0) {
    const int device = std::countr_zero(untold);
    const Notice receives{.kind = NoticeKind::receives, .key = devices->uid(device)};
    if (!try_send_notice(socket, receives, {})) return;
    told_devices_ |= std::uint64_t{1} << device;
    untold &= untold - 1;
  }
}

void PeerSegments::abandon() noexcept {
  for (auto& [id, segment] : segments_) segment.descriptor.reset();
}

}  // namespace moolink::transport::shm
