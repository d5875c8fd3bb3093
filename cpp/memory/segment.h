#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/buffer.h"
#include "base/descriptor.h"

namespace moolink::memory {

// Memory that processes of one host share: a memfd of fixed size, mapped for reading and writing.
// It is sealed SHRINK|GROW|SEAL, so that no process can cut it short and let another one die of
// SIGBUS; more memory is another segment. The kernel frees it with the last mapping and descriptor.
class Segment : public std::enable_shared_from_this<Segment> {
 public:
  // A new segment of at least `size` bytes (whole pages), all zero. `label` is shown in
  // /proc/PID/maps. Throws Exception{error} if the system refuses, Exception{invalid_argument} if
  // the size is 0.
  static std::shared_ptr<Segment> create(std::size_t size, const char* label);
  // The same, and other processes can map it for reading only (where the kernel knows that seal).
  static std::shared_ptr<Segment> create_to_lend(std::size_t size, const char* label);
  // Maps a segment that another process made. Throws Exception{wire} unless it is a sealed memfd of
  // at least one page and at most `max_size` bytes.
  static std::shared_ptr<Segment> map(Descriptor descriptor, std::size_t max_size);
  // The same for reading only: writing to it ends this process.
  static std::shared_ptr<Segment> map_read_only(Descriptor descriptor, std::size_t max_size);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  int descriptor() const { return descriptor_.get(); }
  // Once it was passed to whoever needs it: the memory stays mapped.
  void close_descriptor() { descriptor_.reset(); }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }
  // A part of it that keeps the whole mapped.
  MutableBuffer buffer(std::size_t offset, std::size_t size);

 private:
  Segment(Descriptor descriptor, std::byte* data, std::size_t size);
  static std::shared_ptr<Segment> make(std::size_t size, const char* label, bool to_lend);
  static std::shared_ptr<Segment> adopt(Descriptor descriptor, std::size_t max_size,
                                        int protection);

  Descriptor descriptor_;
  std::byte* data_;
  std::size_t size_;
};

// The size of `size` bytes in whole pages.
std::size_t round_to_pages(std::size_t size);

}  // namespace moolink::memory
