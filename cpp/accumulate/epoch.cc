#include "accumulate/epoch.h"

namespace moolink::accumulate {

const group::MemberInfo* Epoch::coordinator() const {
  if (view_->members.empty()) return nullptr;
  const group::MemberInfo& first = view_->members.front();
  return first.role == group::Role::observer ? nullptr : &first;
}

const std::string& Epoch::name_of(const Uid& instance) const {
  static const std::string kUnknown;
  const group::MemberInfo* member = view_->find(instance);
  return member == nullptr ? kUnknown : member->name;
}

std::vector<std::string> Epoch::names_of(const std::vector<Uid>& instances) const {
  std::vector<std::string> names;
  for (const Uid& instance : instances) names.push_back(name_of(instance));
  return names;
}

}  // namespace moolink::accumulate
