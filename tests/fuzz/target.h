#pragma once

// What the fuzz targets have in common. A target reads its input as a series of choices (Input) and
// acts on them; FUZZ_CHECK ends the program where something is wrong, as the sanitizers do.
// docs/design/fuzzing.md says how to run them.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"

namespace moolink::fuzz {

using Bytes = std::vector<std::byte>;

class Input;

// Acts on what is tested as the input says; every target has its own.
void run(Input input);

// Good inputs of this target, from which a fuzzer begins. Made by the code under test, so that they
// do not grow old when a format changes.
std::vector<Bytes> seeds();

#define FUZZ_CHECK(condition)                                                             \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

// An input, read from its beginning; zeros follow its end.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size)
      : left_(reinterpret_cast<const std::byte*>(data), size) {}

  bool empty() const { return left_.empty(); }
  std::uint8_t byte() {
    if (left_.empty()) return 0;
    const auto value = static_cast<std::uint8_t>(left_.front());
    left_ = left_.subspan(1);
    return value;
  }
  bool chance() { return (byte() & 1) != 0; }
  std::size_t below(std::size_t limit) { return byte() % limit; }
  // A small number in one byte, any number in nine.
  std::uint64_t number() {
    const std::uint8_t first = byte();
    if (first != 0xff) return first;
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value |= std::uint64_t{byte()} << (8 * i);
    return value;
  }
  // A run of bytes after its length; of exactly its size, so that a sanitizer sees one too many.
  Bytes bytes() {
    const std::size_t low = byte();
    const std::size_t wanted = low + std::size_t{256} * byte();
    const std::size_t size = std::min(left_.size(), wanted);
    Bytes run(left_.begin(), left_.begin() + static_cast<std::ptrdiff_t>(size));
    left_ = left_.subspan(size);
    return run;
  }
  Bytes rest() {
    Bytes run(left_.begin(), left_.end());
    left_ = {};
    return run;
  }

 private:
  std::span<const std::byte> left_;
};

// The same choices, written; for seeds().
class Output {
 public:
  Output& byte(std::uint64_t value) {
    bytes_.push_back(static_cast<std::byte>(value));
    return *this;
  }
  Output& number(std::uint64_t value) {
    if (value < 0xff) return byte(value);
    byte(0xff);
    for (int i = 0; i < 8; ++i) byte(value >> (8 * i));
    return *this;
  }
  Output& bytes(std::span<const std::byte> run) {
    byte(run.size() % 256).byte(run.size() / 256);
    return rest(run);
  }
  Output& rest(std::span<const std::byte> run) {
    bytes_.insert(bytes_.end(), run.begin(), run.end());
    return *this;
  }
  Bytes take() { return std::exchange(bytes_, {}); }

 private:
  Bytes bytes_;
};

inline Buffer as_buffer(Bytes bytes) {
  auto owner = std::make_shared<const Bytes>(std::move(bytes));
  const std::byte* data = owner->data();
  const std::size_t size = owner->size();
  return {std::move(owner), data, size};
}

// Counts what is held of it, and refuses what nobody should ask for.
class CountingAllocator final : public Allocator {
 public:
  explicit CountingAllocator(std::size_t most) : most_(most) {}

  MutableBuffer allocate(std::size_t size) override {
    if (size > most_) throw std::bad_alloc();
    MutableBuffer memory = heap_.allocate(size);
    *held_ += size;
    std::shared_ptr<void> owner(memory.data(),
                                [memory, held = held_](void*) { *held -= memory.size(); });
    return {std::move(owner), memory.data(), size};
  }
  std::size_t held() const { return *held_; }

 private:
  std::size_t most_;
  HeapAllocator heap_;
  std::shared_ptr<std::size_t> held_ = std::make_shared<std::size_t>(0);
};

// Runs `act`; nothing but an error of the given codes may come of it. Returns whether it threw.
template <class Act>
bool refused(Act act, std::initializer_list<ErrorCode> codes = {ErrorCode::wire}) {
  try {
    act();
    return false;
  } catch (const Exception& e) {
    FUZZ_CHECK(std::find(codes.begin(), codes.end(), e.error().code) != codes.end());
    return true;
  }
}

// Good bytes with a few of them changed, cut or grown, as the input says.
inline void bend(Input& input, Bytes& bytes) {
  for (std::size_t changes = input.below(4); changes > 0 && !bytes.empty(); --changes) {
    const std::size_t at = input.number() % bytes.size();
    switch (input.below(4)) {
      case 0:
        bytes[at] = static_cast<std::byte>(input.byte());
        break;
      case 1:
        bytes[at] ^= std::byte{1} << input.below(8);
        break;
      case 2:
        bytes.resize(at);
        break;
      default: {
        const Bytes run = input.bytes();
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), run.begin(), run.end());
      }
    }
  }
  bytes.shrink_to_fit();
}

// Machines that act as the input says, and whose messages are taken after each step.
template <class World>
void drive(World& world, Input& input) {
  constexpr int kMostSteps = 300;
  for (int steps = 0; steps < kMostSteps && !input.empty(); ++steps) {
    world.act(input);
    world.drain();
  }
}

}  // namespace moolink::fuzz
