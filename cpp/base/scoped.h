#pragma once

#include <memory>
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

// Keeps an entry in a list while this object lives. It must be destroyed with the list's lock held.
template <class Entry>
class Listed {
 public:
  Listed() = default;
  Listed(std::vector<Entry*>& list, std::type_identity_t<Entry>& entry) : entry_(&entry, {&list}) {
    list.push_back(&entry);
  }
  void reset() { entry_.reset(); }

 private:
  struct TakeOut {
    std::vector<Entry*>* list;
    void operator()(Entry* entry) const { std::erase(*list, entry); }
  };
  std::unique_ptr<Entry, TakeOut> entry_;
};

}  // namespace moolink
