#pragma once

#include <type_traits>
#include <vector>

namespace moolink {

// Sets a flag until the end of a scope, however it is left.
class Scoped {
 public:
  explicit Scoped(bool& flag) : flag_(flag) { flag_ = true; }
  ~Scoped() { flag_ = false; }
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 private:
  bool& flag_;
};

// An entry of a list until the end of a scope, however it is left.
template <class Entry>
class Listed {
 public:
  Listed(std::vector<Entry*>& list, std::type_identity_t<Entry>& entry)
      : list_(list), entry_(&entry) {
    list_.push_back(entry_);
  }
  ~Listed() { std::erase(list_, entry_); }
  Listed(const Listed&) = delete;
  Listed& operator=(const Listed&) = delete;

 private:
  std::vector<Entry*>& list_;
  Entry* entry_;
};

}  // namespace moolink
