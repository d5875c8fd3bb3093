#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace moolink {

// The names of an enum's values, which begin at 0 and have no gaps.
template <class Enum, std::size_t kCount>
struct EnumNames {
  std::array<const char*, kCount> names;

  // "?" for a number that is no value.
  constexpr const char* operator[](Enum value) const {
    const auto number = static_cast<std::size_t>(value);
    return number < kCount ? names[number] : "?";
  }
  constexpr std::optional<Enum> find(std::string_view name) const {
    for (std::size_t i = 0; i < kCount; ++i) {
      if (names[i] == name) return static_cast<Enum>(i);
    }
    return std::nullopt;
  }
};

template <auto kLast, class... Names>
constexpr auto enum_names(Names... names) {
  static_assert(sizeof...(names) == static_cast<std::size_t>(kLast) + 1);
  return EnumNames<decltype(kLast), sizeof...(names)>{{names...}};
}

}  // namespace moolink
