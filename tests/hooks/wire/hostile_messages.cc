#include "wire/hostile_messages.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "wire/frame.h"

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

}  // namespace

std::optional<std::uint64_t> lie_about(const char* name) {
  static const Lie lie = lie_from_environment();
  if (lie.name != name) return std::nullopt;
  // So that a test can verify that this process falsified a number.
  static const int said = std::fprintf(stderr, "lies about %s\n", name);
  static_cast<void>(said);
  return lie.value;
}

void lie_about_version(Hello& hello) {
  lie("hello.version", hello.wire_min);
  lie("hello.version", hello.wire_max);
  lie("hello.features", hello.features);
  if (const auto newer = lie_about("hello.next")) {
    hello.wire_max += static_cast<std::uint32_t>(*newer);
    hello.features = ~std::uint64_t{0};
    hello.later.bytes.assign(100, std::byte{0xff});
  }
}

// Only messages with content are falsified: the peers must connect first.
void lie_in(MessageHead& head) {
  constexpr std::uint64_t kSomething = 1000;
  const auto is_something = [](const PartHead& part) { return part.bytes >= kSomething; };
  if (std::none_of(head.parts.begin(), head.parts.end(), is_something)) return;
  for (LentPart& lent : head.lent) {
    lie("loan.part", lent.part);
    lie("loan.segment", lent.segment);
    lie("loan.offset", lent.offset);
  }
  for (PartHead& part : head.parts) {
    lie("part.align", part.align);
    if (part.where == PartWhere::inline_) lie("inline.bytes", part.bytes);
    if (part.where == PartWhere::stream) lie("stream.bytes", part.bytes);
    if (part.where == PartWhere::grant) lie("wanted.bytes", part.bytes);
    if (part.where == PartWhere::loan) lie("loan.bytes", part.bytes);
    if (part.where == PartWhere::placed) {
      lie("placed.bytes", part.bytes);
      lie("placed.grant", part.id);
    }
  }
  lie("message.lane_prev", head.lane_prev);
}

void lie_in(ChunkHead& chunk) {
  lie("chunk.seq", chunk.seq);
  lie("chunk.part", chunk.part);
  lie("chunk.offset", chunk.offset);
  lie("chunk.bytes", chunk.bytes);
}

void lie_in(Grant& grant) {
  if (grant.grant == 0) return;
  lie("grant.seq", grant.seq);
  lie("grant.bytes", grant.bytes);
  lie("grant.segment", grant.segment);
  lie("grant.offset", grant.offset);
}

void lie_in(Done& done) { lie("done.grant", done.grant); }

void lie_in(Want& want) {
  lie("want.seq", want.seq);
  lie("want.part", want.part);
  lie("want.bytes", want.bytes);
}

}  // namespace moolink::wire
