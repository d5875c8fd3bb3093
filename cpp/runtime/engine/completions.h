#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "io/event.h"
#include "runtime/engine/context.h"

namespace moolink::runtime {

// Operations that have become ready, for an event loop that watches a descriptor: the thread that
// completes an operation sets it, with no other thread in between.
class Completions final : public Forkable {
 public:
  static std::shared_ptr<Completions> create(std::shared_ptr<Context> context);
  ~Completions() override = default;
  // The event loop is gone; call this before dropping the last reference other than those of
  // operations. Operations drop theirs when they complete, with the engine's lock held.
  void close();

  // Readable while tokens wait.
  int descriptor() const { return ready_.descriptor(); }
  // The tokens since the last call.
  std::vector<std::uint64_t> take();

  // --- with the engine's lock held
  // A token will come, or be taken back: reserves room for it, so that add() cannot fail.
  void expect();
  void expect_no_more() { --expected_; }
  void add(std::uint64_t token) noexcept;

  void abandon() noexcept override { ready_.abandon(); }

 private:
  explicit Completions(std::shared_ptr<Context> context);

  std::shared_ptr<Context> context_;
  io::Event ready_;
  std::vector<std::uint64_t> tokens_;
  std::size_t expected_ = 0;
  bool closed_ = false;
};

}  // namespace moolink::runtime
