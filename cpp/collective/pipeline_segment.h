#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace moolink::collective {

// The shared segment of a pipeline: a header, and for each rank a line of words, a ring of statuses
// and a ring of windows. docs/design/protocol/shared_memory.md describes it.

// The same on every rank of a segment.
struct PipelineLayout {
  std::uint64_t epoch = 0;
  std::uint32_t ranks = 0;
  std::uint32_t depth = 0;         // windows of each rank, and so the maximum of chunks in flight
  std::uint64_t window_bytes = 0;  // a multiple of the cache line

  bool operator==(const PipelineLayout&) const = default;
};

inline constexpr std::uint32_t kMaxPipelineRanks = 1024;
inline constexpr std::uint32_t kMaxPipelineDepth = 64;

// The first three are in the order in which a chunk passes through them, which is also the order of
// the words. kSum, between kPut and kReduce, is of exchanged operations only and has no word.
enum Stage : std::size_t { kPut, kReduce, kTake, kSum };

class PipelineSegment {
 public:
  // Written by its rank only.
  struct alignas(64) Words {
    // The last chunk for which: my parts are in my window · my slice is reduced · I have taken all
    // that I need from the others' windows.
    std::array<std::atomic<std::uint64_t>, 3> done;
    // For each word, the chunk that I wait for all ranks to reach; 0: I do not wait for this word.
    std::array<std::atomic<std::uint64_t>, 3> wanted;
    std::atomic<std::uint64_t> left;    // 1: I am in a newer epoch
    std::atomic<std::uint64_t> asleep;  // 1: ring my doorbell when all have what I want
  };

  // Of one operation at one rank, which writes it before it posts the operation's first chunk.
  struct Status {
    std::atomic<std::uint64_t> given_up;  // s: the rank has abandoned operation s
    std::atomic<std::uint64_t> segment;   // of its lent memory; 0: it passes through windows
    std::atomic<std::uint64_t> offset;
    std::atomic<std::uint64_t> fingerprint;
  };

  // Throws Exception{invalid_argument} if the layout is beyond the limits.
  static std::uint64_t bytes_of(const PipelineLayout& layout);
  // Writes the header of a new segment, which is all zero.
  static void initialise(std::span<std::byte> segment, const PipelineLayout& layout);

  // `owner` keeps the segment mapped. Throws Exception{wire} if the segment has another layout.
  PipelineSegment(std::shared_ptr<void> owner, std::span<std::byte> segment,
                  const PipelineLayout& layout);

  const PipelineLayout& layout() const { return layout_; }
  Words& words(std::uint32_t rank) const;
  Status& status(std::uint32_t rank, std::uint64_t s) const;
  std::byte* window(std::uint32_t rank, std::uint64_t chunk) const;
  // The last chunk for which all ranks have completed this stage.
  std::uint64_t least(Stage stage) const;
  // Whether some rank is in a newer epoch · has abandoned operation s.
  bool is_left() const;
  bool is_abandoned(std::uint64_t s) const;

 private:
  const std::shared_ptr<void> owner_;
  std::byte* const segment_;
  const PipelineLayout layout_;
};

}  // namespace moolink::collective
