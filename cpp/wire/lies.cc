#include "wire/lies.h"

#ifdef MOOLINK_CRASH_POINTS
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "wire/frame.h"
#include "wire/lie.h"

namespace moolink::wire {
namespace {

struct Lie {
  std::string name;
  std::uint64_t value = 0;
};

Lie lie_from_environment() {
  const char* text = std::getenv("MOOLINK_LIE");
  const std::string lie = text == nullptr ? "" : text;
  const auto equals = lie.find('=');
  if (equals == std::string::npos) return {};
  return {lie.substr(0, equals), std::strtoull(lie.c_str() + equals + 1, nullptr, 0)};
}

template <class Number>
void tell(const char* name, Number& number) {
  std::uint64_t told = number;
  lie(name, told);
  number = static_cast<Number>(told);
}

}  // namespace

void lie(const char* name, std::uint64_t& number) {
  static const Lie lie = lie_from_environment();
  if (lie.name == name) number = lie.value;
}

// Only messages with something in them lie: the peers get to know one another first.
MessageHead told(const MessageHead& head) {
  MessageHead lying = head;
  constexpr std::uint64_t kSomething = 1000;
  const auto is_something = [](const PartHead& part) { return part.bytes >= kSomething; };
  if (std::none_of(head.parts.begin(), head.parts.end(), is_something)) return lying;
  for (LentPart& lent : lying.lent) {
    tell("loan.part", lent.part);
    tell("loan.segment", lent.segment);
    tell("loan.offset", lent.offset);
  }
  for (PartHead& part : lying.parts) {
    tell("part.align", part.align);
    if (part.where == PartWhere::inline_) tell("inline.bytes", part.bytes);
    if (part.where == PartWhere::stream) tell("stream.bytes", part.bytes);
    if (part.where == PartWhere::grant) tell("wanted.bytes", part.bytes);
    if (part.where == PartWhere::loan) tell("loan.bytes", part.bytes);
    if (part.where == PartWhere::placed) {
      tell("placed.bytes", part.bytes);
      tell("placed.grant", part.id);
    }
  }
  tell("message.lane_prev", lying.lane_prev);
  return lying;
}

ChunkHead told(const ChunkHead& chunk) {
  ChunkHead lying = chunk;
  tell("chunk.seq", lying.seq);
  tell("chunk.part", lying.part);
  tell("chunk.offset", lying.offset);
  tell("chunk.bytes", lying.bytes);
  return lying;
}

Grant told(const Grant& grant) {
  Grant lying = grant;
  if (grant.grant == 0) return lying;
  tell("grant.seq", lying.seq);
  tell("grant.bytes", lying.bytes);
  tell("grant.segment", lying.segment);
  tell("grant.offset", lying.offset);
  return lying;
}

Done told(const Done& done) {
  Done lying = done;
  tell("done.grant", lying.grant);
  return lying;
}

Want told(const Want& want) {
  Want lying = want;
  tell("want.seq", lying.seq);
  tell("want.part", lying.part);
  tell("want.bytes", lying.bytes);
  return lying;
}

}  // namespace moolink::wire
#endif
