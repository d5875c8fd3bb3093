#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

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
  void close() {
    if (context_->abandoned()) return;
    const Engine::Lock lock = context_->engine().lock();
    context_->remove(*this);
    closed_ = true;
  }

  // Readable while tokens wait.
  int descriptor() const { return ready_.descriptor(); }
  // The tokens since the last call.
  std::vector<std::uint64_t> take() {
    const Engine::Lock lock = context_->lock();
    std::vector<std::uint64_t> next;
    next.reserve(expected_);
    ready_.clear();
    return std::exchange(tokens_, std::move(next));
  }

  // --- with the engine's lock held
  // A token will come, or be taken back: reserves room for it, so that add() cannot fail.
  void expect() {
    tokens_.reserve(tokens_.size() + expected_ + 1);
    ++expected_;
  }
  void expect_no_more() { --expected_; }
  void add(std::uint64_t token) noexcept {
    --expected_;
    if (closed_) return;
    tokens_.push_back(token);
    if (tokens_.size() == 1) ready_.set();
  }

  void abandon() noexcept override { ready_.abandon(); }

 private:
  explicit Completions(std::shared_ptr<Context> context) : context_(std::move(context)) {
    context_->add(*this);
  }

  std::shared_ptr<Context> context_;
  io::Event ready_;
  std::vector<std::uint64_t> tokens_;
  std::size_t expected_ = 0;
  bool closed_ = false;
};

}  // namespace moolink::runtime
