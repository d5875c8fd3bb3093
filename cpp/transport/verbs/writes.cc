#include "transport/verbs/writes.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "device/block.h"

namespace moolink::transport::verbs {

void Writes::add(const wire::GrantPlace& place, Buffer bytes) {
  if (bytes.size() > place.bytes || place.segment > 0xffffffff) {
    throw Exception(ErrorCode::wire, "a grant of " + std::to_string(place.bytes) +
                                         " bytes for a part of " + std::to_string(bytes.size()));
  }
  auto part = std::make_shared<Part>(Part{place, std::move(bytes), nullptr, 0, {}});
  part->region = sources_.of(part->bytes);
  if (part->region == nullptr && device::block_of(part->bytes) != nullptr) {
    throw Exception(ErrorCode::error, "a part on a CUDA device that RDMA does not read");
  }
  const bool several = part->bytes.size() > kPieceBytes && part->region != nullptr;
  if (several && pairs_.size() > 1) {
    part->unmarked.resize(pairs_.size());
    spread_.push_back(std::move(part));
  } else {
    whole_.push_back(std::move(part));
  }
}

bool Writes::step(std::optional<wire::GrantPlace>& written) {
  if (whole_ready()) {
    written = step_whole();
  } else if (const auto pair = spread_pair()) {
    written = step_spread(*pair);
  } else {
    return false;
  }
  return true;
}

// --- by the first queue pair

bool Writes::whole_ready() const {
  return !whole_.empty() && on_their_way_[0].size() < kPieces && pairs_.first().room() > 0 &&
         (whole_.front()->region != nullptr || packets_.has_slot());
}

std::optional<wire::GrantPlace> Writes::step_whole() {
  const std::shared_ptr<Part> part = whole_.front();
  const Buffer& bytes = part->bytes;
  auto from = bytes.span().subspan(part->done);
  if (part->region != nullptr) {
    from = from.first(std::min(kPieceBytes, from.size()));
    post(0, part, from, part->region->local_key());
  } else {
    const std::span<std::byte> slot = packets_.borrow();
    if (slot.empty()) return std::nullopt;
    from = from.first(std::min(slot.size(), from.size()));
    std::memcpy(slot.data(), from.data(), from.size());
    post(0, part, slot.first(from.size()), packets_.key());
    packets_.borrowed(on_their_way_[0].back().request);
  }
  if (!part->has_left()) return std::nullopt;
  whole_.pop_front();
  return part->place;
}

// --- by the others

std::optional<std::size_t> Writes::spread_pair() const {
  if (spread_.empty()) return std::nullopt;
  const Part& part = *spread_.front();
  std::optional<std::size_t> best;
  for (std::size_t pair = 1; pair < pairs_.size(); ++pair) {
    if (pairs_.at(pair).room() == 0) continue;
    const std::size_t pieces = on_their_way_[pair].size();
    const bool can =
        part.has_left() ? part.unmarked[pair] && packets_.has_credit() : pieces < most_pieces();
    if (can && (!best || pieces < on_their_way_[*best].size())) best = pair;
  }
  return best;
}

std::optional<wire::GrantPlace> Writes::step_spread(std::size_t pair) {
  const std::shared_ptr<Part> part = spread_.front();
  if (!part->has_left()) {
    auto from = part->bytes.span().subspan(part->done);
    from = from.first(std::min(kPieceBytes, from.size()));
    post(pair, part, from, part->region->local_key());
    part->unmarked[pair] = true;
    return std::nullopt;
  }
  // Its completion is requested: otherwise the queue pair would never be idle.
  pairs_.at(pair).send({}, std::nullopt, 0, true);
  packets_.marked();
  part->unmarked[pair] = false;
  if (std::find(part->unmarked.begin(), part->unmarked.end(), true) != part->unmarked.end()) {
    return std::nullopt;
  }
  spread_.pop_front();
  return part->place;
}

void Writes::post(std::size_t pair, const std::shared_ptr<Part>& part,
                  std::span<const std::byte> from, std::uint32_t key) {
  // First the memory: the device reads the part from the moment of posting.
  Piece& piece = on_their_way_[pair].emplace_back(Piece{0, part});
  piece.request = pairs_.at(pair).write(from, key, part->place.offset + part->done,
                                        static_cast<std::uint32_t>(part->place.segment));
  part->done += from.size();
}

// --- the end

void Writes::ended(std::size_t pair, std::uint64_t request) {
  std::deque<Piece>& pieces = on_their_way_[pair];
  if (pieces.empty() || pieces.front().request > request) return;
  while (!pieces.empty() && pieces.front().request <= request) pieces.pop_front();
  sources_.drop_dead();  // that part's memory may have been released with it
}

void Writes::clear_waiting() {
  whole_.clear();
  spread_.clear();
}

void Writes::clear() {
  clear_waiting();
  for (auto& pieces : on_their_way_) pieces.clear();
}

}  // namespace moolink::transport::verbs
