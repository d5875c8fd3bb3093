#pragma once

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

}  // namespace moolink
