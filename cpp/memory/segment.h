#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/buffer.h"
#include "base/descriptor.h"

namespace moolink::memory {

// Memory shared by processes of one host: a memfd of fixed size, mapped for reading and writing. It
// is sealed SHRINK|GROW|SEAL, so that no process can truncate it and make another die of SIGBUS;
// more memory is another segment. The kernel frees it with the last mapping and descriptor.
class Segment : public std::enable_shared_from_this<Segment> {
 public:
  // A new segment of at least `size` bytes (whole pages), all zero. `label` is shown in
  // /proc/PID/maps. Throws Exception{error} if the system refuses, Exception{invalid_argument} if
  // the size is 0.
  static std::shared_ptr<Segment> create(std::size_t size, const char* label);
  // The same, but other processes can map it for reading only (if the kernel knows that seal).
  static std::shared_ptr<Segment> create_to_lend(std::size_t size, const char* label);
  // The same as create(), for make_private().
  static std::shared_ptr<Segment> create_to_receive(std::size_t size, const char* label);
  // Maps a segment that another process made; does not keep the descriptor. Throws Exception{wire}
  // unless it is a sealed memfd of at least one page and at most `max_size` bytes, Exception{error}
  // if the system refuses.
  static std::shared_ptr<Segment> map(const Descriptor& descriptor, std::size_t max_size);
  // The same for reading only: writing to it ends this process.
  static std::shared_ptr<Segment> map_read_only(const Descriptor& descriptor, std::size_t max_size);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  int descriptor() const { return descriptor_.get(); }
  // Call it once the descriptor was passed on: the memory stays mapped.
  void close_descriptor() { descriptor_.reset(); }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }
  // A part of it that keeps the whole mapped.
  MutableBuffer buffer(std::size_t offset, std::size_t size);

  // --- for forks: other threads may continue to use the memory meanwhile
  // A later fork gives the child its own copy. Writes of another process stay visible here, except
  // in pages that this process has written since. Only for create_to_receive().
  bool make_private() noexcept;
  // Private memory of the segment's size, for a copy; null: the system refuses.
  struct Unmap {
    std::size_t size = 0;
    void operator()(std::byte* data) const noexcept;
  };
  using Copy = std::unique_ptr<std::byte, Unmap>;
  Copy begin_copy() const noexcept;
  // Replaces the segment by the copy, for reading only.
  bool end_copy(Copy copy) noexcept;
  // The same memory again, at another address; null: the system refuses.
  std::shared_ptr<Segment> map_again() const noexcept;
  // A thread that uses the memory from now on dies of SIGSEGV.
  void forbid() noexcept;

 private:
  Segment(Descriptor descriptor, std::byte* data, std::size_t size);
  static std::shared_ptr<Segment> make(std::size_t size, const char* label, bool to_lend);
  static std::shared_ptr<Segment> adopt(const Descriptor& descriptor, std::size_t max_size,
                                        int protection);
  bool put_in_place(std::byte* mapping) noexcept;

  Descriptor descriptor_;
  std::byte* data_;
  std::size_t size_;
  std::byte* private_ = nullptr;  // a private mapping of the same memory, not used yet
};

// The size of `size` bytes in whole pages.
std::size_t round_to_pages(std::size_t size);

}  // namespace moolink::memory
