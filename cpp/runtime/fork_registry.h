#pragma once

#include <mutex>
#include <vector>

namespace moolink::runtime {

class Context;

// The contexts of this process, so that fork() can be survived: pthread_atfork has no other way to
// find them. A fork waits until no engine is in the middle of something; the child closes all
// descriptors and marks its contexts abandoned.
class ForkRegistry {
 public:
  static ForkRegistry& instance();
  void add(Context& context);
  void remove(Context& context);

 private:
  ForkRegistry();
  void before();
  void in_parent();
  void in_child();

  std::mutex mutex_;
  std::vector<Context*> contexts_;
};

}  // namespace moolink::runtime
