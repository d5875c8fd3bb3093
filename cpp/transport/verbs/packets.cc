#include "transport/verbs/packets.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "base/error.h"

namespace moolink::transport::verbs {

PacketWriter::PacketWriter(Device& device, QueuePair& pair)
    : pair_(pair),
      memory_(HeapAllocator().allocate(kSlots * kSlotBytes)),
      region_(device.register_memory(memory_.data(), memory_.size(), IBV_ACCESS_LOCAL_WRITE)) {
  if (!region_) {
    throw Exception(ErrorCode::error,
                    "no memory to send from can be registered: " + registration_failure(errno));
  }
  in_use_.reserve(kSlots + kMostEmpty);  // recording what was posted cannot fail
}

void PacketWriter::taken_by_peer(std::uint16_t taken) {
  if (static_cast<std::uint16_t>(taken - taken_by_peer_) > in_flight()) {
    throw Exception(ErrorCode::wire, "the peer says that it took more than was sent");
  }
  taken_by_peer_ = taken;
}

void PacketWriter::marked() {
  ++sent_;
  ++marks_;
}

void PacketWriter::ended(std::uint64_t request) {
  auto next = in_use_.begin();
  for (; next != in_use_.end() && next->request <= request; ++next) {
    freed_slots_ += next->slot ? 1 : 0;
    empties_ -= next->empty ? 1 : 0;
  }
  in_use_.erase(in_use_.begin(), next);
}

std::size_t PacketWriter::write(std::span<const std::byte> bytes) {
  std::size_t written = 0;
  while (written < bytes.size() && ready()) {
    const std::span<std::byte> into = slot(next_slot_).subspan(filled_);
    const std::size_t size = std::min(into.size(), bytes.size() - written);
    std::memcpy(into.data(), bytes.data() + written, size);
    written += size;
    filled_ += size;
    if (filled_ == kSlotBytes) post();
  }
  return written;
}

void PacketWriter::publish() {
  if (filled_ > 0) post();
}

void PacketWriter::post() {
  const std::span<const std::byte> bytes = slot(next_slot_).first(filled_);
  const bool copied = filled_ <= pair_.inline_bytes();
  filled_ = 0;
  const std::uint64_t request = pair_.send(
      bytes, copied ? std::nullopt : std::optional(region_.local_key()), immediate(), asks());
  ++sent_;
  told_ = taken_;
  if (copied) return;  // the slot is free already
  in_use_.push_back({request, true, false});
  ++next_slot_;
}

bool PacketWriter::send_empty(bool tell) {
  if (pair_.room() == 0 || empties_ >= kMostEmpty) return false;
  // The last one possible must be completed with a report, or no other could ever follow.
  tell = tell || empties_ + 1 == kMostEmpty;
  silent_ = tell ? 0 : silent_ + 1;
  const std::uint64_t request = pair_.send({}, std::nullopt, immediate(), tell);
  in_use_.push_back({request, false, true});
  ++empties_;
  told_ = taken_;
  return true;
}

std::span<std::byte> PacketWriter::borrow() {
  publish();
  return free_slots() > 0 ? slot(next_slot_) : std::span<std::byte>();
}

void PacketWriter::borrowed(std::uint64_t request) {
  in_use_.push_back({request, true, false});
  ++next_slot_;
}

std::span<std::byte> PacketWriter::slot(std::uint64_t number) {
  return memory_.slice(number % kSlots * kSlotBytes, kSlotBytes).span();
}

}  // namespace moolink::transport::verbs
