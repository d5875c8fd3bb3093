#pragma once

#include <compare>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>

namespace moolink {

inline constexpr std::size_t kMaxName = 1024;  // bytes

// Whether it has 1 to kMaxName bytes and no control characters.
bool is_name(std::string_view text);
// The same text in one line, for a log: control characters, which peers may have sent, become '?'.
std::string in_one_line(std::string text);
// Throws Exception{invalid_argument} unless it is a name. `what` describes it: "a peer's name".
void check_name(std::string_view what, const std::string& name);
// One text for several names, and a different one for every other list of names.
std::string join_names(std::initializer_list<std::string_view> names);
// Such a text for a message to the user: "group/accumulator".
std::string joined_names_text(std::string joined);

// A peer as its callers name it: by its name alone, or also by its group.
struct PeerName {
  std::string name;
  std::string group;  // empty: not named

  // From the name, or from join_names({group, name}).
  static PeerName of(const std::string& joined);
  // For a message to the user: "group/name", or the name alone.
  std::string text() const { return group.empty() ? name : group + '/' + name; }
  auto operator<=>(const PeerName&) const = default;
};

}  // namespace moolink
