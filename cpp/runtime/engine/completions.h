#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "io/event.h"
#include "runtime/engine/context.h"

namespace moolink::runtime {

// What has become ready, for an event loop that watches a descriptor: whoever completes an
// operation sets it, and no other thread stands between it and the loop.
class Completions final : public Forkable {
 public:
  static std::shared_ptr<Completions> create(std::shared_ptr<Context> context);
  ~Completions() override = default;
  // The event loop is gone; to be called before the last reference but those of operations is
  // dropped. These drop theirs when they complete, with the engine's lock held.
  void close();

  // Readable while tokens wait.
  int descriptor() const { return ready_.descriptor(); }
  // The tokens since the last call.
  std::vector<std::uint64_t> take();

  // --- with the engine's lock held
  // A token will come, or be taken back: room is made for it, so that add() cannot fail.
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
