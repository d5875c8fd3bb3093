#include "session/outbox.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace moolink::session {

namespace {

// Selects the bytes of a message that go outside its frame: the same in every attempt.
void plan_parts(Outgoing& outgoing) {
  std::uint64_t in_frame = 0;
  const auto place = [&](const Buffer& bytes, std::uint32_t part) {
    if (bytes.size() <= kInlineBytes && in_frame + bytes.size() <= kInlineTotal) {
      in_frame += bytes.size();
      return;
    }
    outgoing.large.push_back({part, LargePart::State::waiting, 0});
    outgoing.large_bytes += bytes.size();
  };
  const wire::Payload& payload = outgoing.message.payload;
  outgoing.loans.assign(payload.lent.size(), 0);
  place(payload.body, wire::kBodyPart);
  for (std::size_t i = 0; i < payload.parts.size(); ++i) {
    place(payload.parts[i], static_cast<std::uint32_t>(i));
  }
  outgoing.inline_bytes = in_frame;
  outgoing.parts_cost = payload.parts.size() * wire::kPartCost;
}

}  // namespace

LargePart* Outgoing::find_large(std::uint32_t part) {
  // They are in the order of the parts, after the body.
  const bool has_body = !large.empty() && large.front().part == wire::kBodyPart;
  if (part == wire::kBodyPart) return has_body ? &large.front() : nullptr;
  const auto found = std::lower_bound(
      large.begin() + (has_body ? 1 : 0), large.end(), part,
      [](const LargePart& one, std::uint32_t number) { return one.part < number; });
  return found == large.end() || found->part != part ? nullptr : &*found;
}

void Outgoing::begin_attempt() {
  connection = 0;
  ++attempt;
  lending = Lending::unasked;
  for (LargePart& part : large) part = {part.part, LargePart::State::waiting, 0};
  unsent.reset();
  has_turn = false;
}

Outgoing* Outbox::find(std::uint64_t seq) {
  if (seq < first_ || seq - first_ >= messages_.size()) return nullptr;
  Outgoing& outgoing = messages_[static_cast<std::size_t>(seq - first_)];
  return outgoing.acked ? nullptr : &outgoing;
}

bool Outbox::has_room(std::uint64_t bytes, std::size_t parts, bool held) const {
  if (held && peer_window_.messages == 0) return false;
  if (unacked_ >= limits_.send_window_messages || messages_.size() >= kMaxSpan) return false;
  const std::uint64_t window =
      std::min<std::uint64_t>(limits_.send_window_bytes, peer_window_.bytes);
  const auto fits = [window](std::uint64_t used, std::uint64_t more) {
    return used == 0 || used + more <= window;
  };
  // How much of it travels outside its frame depends on its parts; all of it may.
  const std::uint64_t in_frame =
      std::min<std::uint64_t>(bytes, kInlineTotal) + parts * wire::kPartCost;
  return fits(inline_bytes_ + parts_cost_, in_frame) &&
         (bytes <= kInlineBytes || fits(large_bytes_, bytes));
}

void check(const OutgoingMessage& message, const Limits& limits) {
  const auto refuse = [](const std::string& what, std::uint64_t size, std::uint64_t limit) {
    throw Exception(ErrorCode::invalid_argument,
                    what + std::to_string(size) + " exceeds the limit of " + std::to_string(limit));
  };
  const wire::Payload& payload = message.payload;
  if (payload.body.size() > limits.max_body) {
    refuse("a message's body of bytes ", payload.body.size(), limits.max_body);
  }
  if (payload.parts.size() > limits.max_parts) {
    refuse("the number of tensors in a message, ", payload.parts.size(), limits.max_parts);
  }
  std::uint64_t total = payload.body.size();
  for (const Buffer& part : payload.parts) {
    if (part.size() > limits.max_part) refuse("a tensor of bytes ", part.size(), limits.max_part);
    total += part.size();
  }
  if (total > limits.max_message) refuse("a message of bytes ", total, limits.max_message);
}

std::uint64_t Outbox::push(OutgoingMessage message) {
  Outgoing& outgoing = messages_.emplace_back();
  outgoing.message = std::move(message);
  const std::uint64_t seq = last();
  if (outgoing.message.lane != 0) {
    outgoing.lane_prev = std::exchange(lane_last_[outgoing.message.lane], seq);
  }
  plan_parts(outgoing);
  inline_bytes_ += outgoing.inline_bytes;
  large_bytes_ += outgoing.large_bytes;
  parts_cost_ += outgoing.parts_cost;
  ++unacked_;
  return seq;
}

void Outbox::trim() {
  while (!messages_.empty() && messages_.front().acked) {
    inline_bytes_ -= messages_.front().inline_bytes;
    large_bytes_ -= messages_.front().large_bytes;
    parts_cost_ -= messages_.front().parts_cost;
    messages_.pop_front();
    ++first_;
  }
}

std::vector<Outgoing> Outbox::clear() {
  std::vector<Outgoing> lost;
  for (Outgoing& outgoing : messages_) {
    if (!outgoing.acked) lost.push_back(std::move(outgoing));
  }
  *this = Outbox(limits_);
  return lost;
}

void Outbox::unassign(wire::ConnectionId connection) {
  for (Outgoing& outgoing : messages_) {
    if (outgoing.acked || outgoing.connection != connection) continue;
    outgoing.begin_attempt();
  }
}

}  // namespace moolink::session
