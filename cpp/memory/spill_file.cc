#include "memory/spill_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <system_error>
#include <utility>

#include "memory/segment.h"

namespace moolink::memory {
namespace {

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

Descriptor make_file(const std::string& directory) {
  std::string path = directory + "/moolink-spill-XXXXXX";
  Descriptor file(::mkostemp(path.data(), O_CLOEXEC));
  if (file) ::unlink(path.c_str());
  return file;
}

struct Unmap {
  std::size_t size;

  void operator()(void* block) const noexcept { ::munmap(block, size); }
};

}  // namespace

SpillFile::SpillFile(std::string directory)
    : directory_(std::move(directory)), file_(make_file(directory_)) {
  const int error = errno;
  if (!file_) fail(error, "cannot make a file to spill to in " + directory_);
}

MutableBuffer SpillFile::allocate(std::size_t size) {
  const std::size_t bytes = round_to_pages(size == 0 ? 1 : size);
  if (bytes < size || bytes > std::numeric_limits<off_t>::max() - end_) throw std::bad_alloc();
  const auto begin = static_cast<off_t>(end_);
  int error = 0;
  do {
    error = ::posix_fallocate(file_.get(), begin, static_cast<off_t>(bytes));
  } while (error == EINTR);
  void* block = MAP_FAILED;
  if (error == 0) {
    block = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), begin);
    if (block == MAP_FAILED) error = errno;
  }
  if (error != 0) {
    // Releases the reserved space, which others may need.
    (void)!::ftruncate(file_.get(), begin);
    fail(error, "cannot spill " + std::to_string(bytes) + " bytes more to " + directory_);
  }
  // The neighbours of a sampled step are not needed soon: no read-ahead.
  ::madvise(block, bytes, MADV_RANDOM);
  end_ += bytes;
  // If the control block cannot be allocated, shared_ptr runs the deleter.
  return {std::shared_ptr<void>(block, Unmap{bytes}), static_cast<std::byte*>(block), size};
}

void SpillFile::read_ahead(std::span<const std::byte> bytes) noexcept {
  const std::size_t in_page = reinterpret_cast<std::uintptr_t>(bytes.data()) % round_to_pages(1);
  auto* page = const_cast<std::byte*>(bytes.data()) - in_page;
  ::madvise(page, in_page + bytes.size(), MADV_WILLNEED);
}

}  // namespace moolink::memory
