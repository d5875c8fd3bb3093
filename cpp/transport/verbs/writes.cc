#include "transport/verbs/writes.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace moolink::transport::verbs {

void Writes::add(const wire::GrantPlace& place, Buffer bytes) {
  if (bytes.size() > place.bytes || place.segment > 0xffffffff) {
    throw Exception(ErrorCode::wire, "a grant of " + std::to_string(place.bytes) +
                                         " bytes for a part of " + std::to_string(bytes.size()));
  }
  auto part = std::make_shared<Part>(Part{place, std::move(bytes), nullptr});
  part->region = registrations_.of(part->bytes);
  waiting_.push_back(std::move(part));
}

bool Writes::ready() const {
  return !waiting_.empty() && on_their_way_.size() < kPieces && pair_.room() > 0 &&
         (waiting_.front()->region != nullptr || packets_.has_slot());
}

bool Writes::step(std::optional<wire::GrantPlace>& written) {
  if (!ready()) return false;
  const std::shared_ptr<Part> part = waiting_.front();
  const Buffer& bytes = part->bytes;
  std::size_t size = std::min(kPieceBytes, bytes.size() - part->done);
  std::span<const std::byte> from = bytes.span().subspan(part->done, size);
  std::uint32_t key = 0;
  if (part->region != nullptr) {
    key = part->region->local_key();
  } else {
    const std::span<std::byte> slot = packets_.borrow();
    if (slot.empty()) return false;
    size = std::min(size, slot.size());
    std::memcpy(slot.data(), from.data(), size);
    from = slot.first(size);
    key = packets_.key();
  }
  const std::uint64_t request = pair_.write(from, key, part->place.offset + part->done,
                                            static_cast<std::uint32_t>(part->place.segment));
  if (part->region == nullptr) packets_.borrowed(request);
  on_their_way_.push_back({request, part});
  part->done += size;
  if (part->done == bytes.size()) {
    written = part->place;
    waiting_.pop_front();
  }
  return true;
}

void Writes::ended(std::uint64_t request) {
  while (!on_their_way_.empty() && on_their_way_.front().request <= request) {
    on_their_way_.pop_front();
  }
}

void Writes::clear() {
  waiting_.clear();
  on_their_way_.clear();
}

}  // namespace moolink::transport::verbs
