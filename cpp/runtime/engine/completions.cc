#include "runtime/engine/completions.h"

#include <utility>

namespace moolink::runtime {

std::shared_ptr<Completions> Completions::create(std::shared_ptr<Context> context) {
  const Engine::Lock lock = context->lock();
  return std::shared_ptr<Completions>(new Completions(context));
}

Completions::Completions(std::shared_ptr<Context> context) : context_(std::move(context)) {
  context_->add(*this);
}

void Completions::close() {
  if (context_->abandoned()) return;
  const Engine::Lock lock = context_->engine().lock();
  context_->remove(*this);
  closed_ = true;
}

void Completions::expect() {
  tokens_.reserve(tokens_.size() + expected_ + 1);
  ++expected_;
}

void Completions::add(std::uint64_t token) noexcept {
  --expected_;
  if (closed_) return;
  tokens_.push_back(token);
  if (tokens_.size() == 1) ready_.set();
}

std::vector<std::uint64_t> Completions::take() {
  const Engine::Lock lock = context_->lock();
  std::vector<std::uint64_t> next;
  next.reserve(expected_);
  ready_.clear();
  return std::exchange(tokens_, std::move(next));
}

}  // namespace moolink::runtime
