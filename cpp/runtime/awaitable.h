#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/time.h"
#include "runtime/completions.h"
#include "runtime/context.h"

namespace moolink::runtime {

// What threads and event loops wait for.
class Awaitable {
 public:
  explicit Awaitable(std::shared_ptr<Context> context) : context_(std::move(context)) {}
  Awaitable(const Awaitable&) = delete;
  Awaitable& operator=(const Awaitable&) = delete;

  bool ready() const { return ready_.load(std::memory_order_acquire); }
  // Waits until ready(), polling the loop if nobody else does; false if the deadline passed. Throws
  // what `interrupt` throws.
  bool wait(Time deadline, const Engine::Interrupt& interrupt);
  // Gives the token to `completions` when this is ready, or at once if it is.
  void notify(const std::shared_ptr<Completions>& completions, std::uint64_t token);

 protected:
  ~Awaitable() = default;

  // --- with the engine's lock held
  // Wakes all who wait.
  void set_ready();
  void set_unready() { ready_.store(false, std::memory_order_release); }

  Context& context() { return *context_; }

 private:
  std::shared_ptr<Context> context_;
  std::atomic<bool> ready_{false};
  std::vector<Waiter*> waiters_;
  std::vector<std::pair<std::shared_ptr<Completions>, std::uint64_t>> watchers_;
};

}  // namespace moolink::runtime
