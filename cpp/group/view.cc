#include "group/view.h"

#include <algorithm>
#include <set>

namespace moolink::group {
namespace {

// Names of the members of `view` that are not in `other`.
std::vector<std::string> names_without(const View& view, const View& other) {
  std::vector<std::string> names;
  for (const MemberInfo& member : view.members) {
    if (other.find(member.instance) == nullptr) names.push_back(member.name);
  }
  return names;
}

}  // namespace

std::string joined(const std::vector<std::string>& names, std::string_view quote) {
  std::string text;
  for (const std::string& name : names) {
    if (!text.empty()) text += ", ";
    text.append(quote).append(name).append(quote);
  }
  return text;
}

bool View::has_duplicates() const {
  std::set<Uid> instances;
  return !std::ranges::all_of(
      members, [&](const MemberInfo& member) { return instances.insert(member.instance).second; });
}

const MemberInfo* View::find(const Uid& instance) const {
  const auto it = std::ranges::find(members, instance, &MemberInfo::instance);
  return it == members.end() ? nullptr : &*it;
}

const MemberInfo* View::find(std::string_view name) const {
  const auto it = std::ranges::find(members, name, &MemberInfo::name);
  return it == members.end() ? nullptr : &*it;
}

std::optional<std::size_t> View::rank_of(const Uid& instance) const {
  const MemberInfo* member = find(instance);
  if (member == nullptr) return std::nullopt;
  return static_cast<std::size_t>(member - members.data());
}

bool View::share_host(const Uid& one, const Uid& other) const {
  const MemberInfo* first = find(one);
  const MemberInfo* second = find(other);
  return first != nullptr && second != nullptr && first->host_key &&
         first->host_key == second->host_key;
}

std::size_t View::participants() const {
  return static_cast<std::size_t>(std::ranges::count_if(
      members, [](const MemberInfo& member) { return member.role != Role::observer; }));
}

std::string describe(const View& view) {
  return "membership " + std::to_string(view.epoch) + " (" + kCauses[view.cause] +
         "): " + joined(names_without(view, {}));
}

Error group_changed(std::string_view group, std::string_view operation, const View& before,
                    const View& after) {
  std::string text(operation);
  text += " of group '" + std::string(group) + "' was begun in membership " +
          std::to_string(before.epoch);
  if (after.empty()) {
    text += " and this peer is no longer in the group";
  } else {
    text += ", now it is membership " + std::to_string(after.epoch) + ": " + kCauses[after.cause];
    if (const auto gone = names_without(before, after); !gone.empty()) {
      text += "; gone: " + joined(gone);
    }
    if (const auto came = names_without(after, before); !came.empty()) {
      text += "; new: " + joined(came);
    }
  }
  text += ". Call it again with the new members.";
  return {
      .code = ErrorCode::group_changed, .message = std::move(text), .function = std::string(group)};
}

}  // namespace moolink::group
