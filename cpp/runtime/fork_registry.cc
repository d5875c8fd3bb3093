#include "runtime/fork_registry.h"

#include <pthread.h>

#include "runtime/context.h"

namespace moolink::runtime {

ForkRegistry& ForkRegistry::instance() {
  // Never destroyed: a process may fork while its statics are being destroyed.
  static ForkRegistry* const registry = new ForkRegistry;
  return *registry;
}

ForkRegistry::ForkRegistry() {
  pthread_atfork([] { instance().before(); }, [] { instance().in_parent(); },
                 [] { instance().in_child(); });
}

void ForkRegistry::add(Context& context) {
  const std::lock_guard guard(mutex_);
  contexts_.push_back(&context);
}

void ForkRegistry::remove(Context& context) {
  const std::lock_guard guard(mutex_);
  std::erase(contexts_, &context);
}

void ForkRegistry::before() {
  mutex_.lock();
  for (Context* context : contexts_) {
    context->engine_.before_fork();
    context->lending_->before_fork();
  }
}

void ForkRegistry::in_parent() {
  for (Context* context : contexts_) {
    context->lending_->after_fork();
    context->engine_.after_fork();
  }
  mutex_.unlock();
}

void ForkRegistry::in_child() {
  Engine::forget_this_thread();
  for (Context* context : contexts_) {
    context->abandon();
    context->lending_->after_fork();
    context->engine_.after_fork();
  }
  contexts_.clear();
  mutex_.unlock();
}

}  // namespace moolink::runtime
