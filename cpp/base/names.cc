#include "base/names.h"

#include <algorithm>

#include "base/error.h"

namespace moolink {

namespace {

constexpr char kBetweenNames = '\x1f';  // a control character: no name contains it

// The position of the first control character of UTF-8, npos if none: U+0000 to U+001F, U+007F, and
// U+0080 to U+009F, which terminals obey too.
std::size_t find_control(std::string_view text, std::size_t from = 0) {
  for (std::size_t i = from; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7f) return i;
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    if (byte == 0xc2 && next >= 0x80 && next < 0xa0) return i;
  }
  return std::string_view::npos;
}

}  // namespace

bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= kMaxName && find_control(text) == std::string_view::npos;
}

std::string in_one_line(std::string text) {
  for (std::size_t at = 0; (at = find_control(text, at)) != std::string::npos; ++at) {
    text.replace(at, text[at] == '\xc2' ? 2 : 1, "?");
  }
  return text;
}

void check_name(std::string_view what, const std::string& name) {
  if (is_name(name)) return;
  throw Exception(ErrorCode::invalid_argument, std::string(what) + " has 1 to " +
                                                   std::to_string(kMaxName) +
                                                   " bytes and no control characters");
}

std::string join_names(std::initializer_list<std::string_view> names) {
  std::string joined;
  for (const std::string_view name : names) {
    if (!joined.empty()) joined += kBetweenNames;
    joined += name;
  }
  return joined;
}

PeerName PeerName::of(const std::string& joined) {
  const std::size_t end = joined.find(kBetweenNames);
  if (end == std::string::npos) return {joined, {}};
  return {joined.substr(end + 1), joined.substr(0, end)};
}

std::string joined_names_text(std::string joined) {
  std::ranges::replace(joined, kBetweenNames, '/');
  return joined;
}

}  // namespace moolink
