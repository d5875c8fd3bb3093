#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/thread_safety.h"
#include "io/event.h"
#include "runtime/engine/context.h"

namespace moolink::runtime {

// Operations that have become ready, for an event loop that watches a descriptor: the thread that
// completes an operation sets it, with no other thread in between.
class Completions final : public Forkable {
 public:
  static std::shared_ptr<Completions> create(std::shared_ptr<Context> context) {
    const Engine::Lock lock = context->lock();
    return std::shared_ptr<Completions>(new Completions(context));
  }
  ~Completions() override = default;
  // The event loop is gone; call this before dropping the last reference other than those of
  // operations. Operations drop theirs when they complete, with the engine's lock held.
  void close() MOOLINK_UNLOCKED {
    if (context_->abandoned()) return;
    const Engine::Lock lock = context_->engine().lock();
    forks_.reset();
    closed_ = true;
  }

  // Readable while tokens wait.
  int descriptor() const { return ready_.descriptor(); }
  // The tokens since the last call.
  std::vector<std::uint64_t> take() MOOLINK_UNLOCKED {
    const Engine::Lock lock = context_->lock();
    std::vector<std::uint64_t> next;
    next.reserve(expected_);
    ready_.clear();
    return std::exchange(tokens_, std::move(next));
  }

  // A token will come, or be taken back: reserves room for it, so that add() cannot fail.
  void expect() MOOLINK_LOCKED {
    tokens_.reserve(tokens_.size() + expected_ + 1);
    ++expected_;
  }
  void expect_no_more() MOOLINK_LOCKED { --expected_; }
  void add(std::uint64_t token) noexcept MOOLINK_LOCKED {
    --expected_;
    if (closed_) return;
    tokens_.push_back(token);
    if (tokens_.size() == 1) ready_.set();
  }

  void abandon() noexcept MOOLINK_LOCKED override { ready_.abandon(); }

 private:
  explicit Completions(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  std::shared_ptr<Context> context_;
  Listed<Forkable> forks_ MOOLINK_GUARDED = context_->add(*this);  // until close()
  io::Event ready_;
  std::vector<std::uint64_t> tokens_ MOOLINK_GUARDED;
  std::size_t expected_ MOOLINK_GUARDED = 0;
  bool closed_ MOOLINK_GUARDED = false;
};

}  // namespace moolink::runtime
