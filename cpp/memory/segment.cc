#include "memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <limits>
#include <new>
#include <string>
#include <utility>

#include "base/system_error.h"

namespace moolink::memory {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int kSealFutureWrite = 0x0010;  // F_SEAL_FUTURE_WRITE, since Linux 5.1
constexpr long kTmpfs = 0x01021994;       // TMPFS_MAGIC

std::byte* map_shared(int descriptor, std::size_t size, int protection = PROT_READ | PROT_WRITE) {
  void* data = ::mmap(nullptr, size, protection, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) {
    throw_system_error("cannot map a shared segment of " + std::to_string(size) + " bytes");
  }
  return static_cast<std::byte*>(data);
}

void seal(int descriptor, bool to_lend) {
  // An older kernel does not know the seal; then borrowers map it read-only voluntarily.
  if (to_lend && ::fcntl(descriptor, F_ADD_SEALS, kSeals | kSealFutureWrite) == 0) return;
  if (::fcntl(descriptor, F_ADD_SEALS, kSeals) != 0) {
    throw_system_error("cannot seal a shared segment");
  }
}

// Pages of other files (huge ones) may be missing on access, which is SIGBUS.
bool is_in_tmpfs(int descriptor) {
  struct statfs system{};
  return ::fstatfs(descriptor, &system) == 0 && system.f_type == kTmpfs;
}

std::size_t page_size() {
  static const std::size_t size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

std::size_t round_to_pages(std::size_t size) {
  return (size + page_size() - 1) / page_size() * page_size();
}

std::shared_ptr<Segment> Segment::create(std::size_t size, const char* label) {
  return make(size, label, false);
}

std::shared_ptr<Segment> Segment::create_to_lend(std::size_t size, const char* label) {
  return make(size, label, true);
}

// The private mapping is made now because the descriptor will be closed.
std::shared_ptr<Segment> Segment::create_to_receive(std::size_t size, const char* label) {
  std::shared_ptr<Segment> segment = make(size, label, false);
  void* mapping = ::mmap(nullptr, segment->size_, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_NORESERVE, segment->descriptor(), 0);
  if (mapping == MAP_FAILED) throw_system_error("cannot map a shared segment a second time");
  segment->private_ = static_cast<std::byte*>(mapping);
  return segment;
}

std::shared_ptr<Segment> Segment::make(std::size_t size, const char* label, bool to_lend) {
  constexpr auto kLargest = static_cast<std::size_t>(std::numeric_limits<off_t>::max() / 2);
  if (size == 0 || size > kLargest) {
    throw Exception(ErrorCode::invalid_argument,
                    "a shared segment cannot have " + std::to_string(size) + " bytes");
  }
  size = round_to_pages(size);
  Descriptor descriptor(::memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor) throw_system_error("cannot make a shared segment (memfd_create)");
  if (::ftruncate(descriptor.get(), static_cast<off_t>(size)) != 0) {
    throw_system_error("cannot give a shared segment " + std::to_string(size) + " bytes");
  }
  std::byte* data = map_shared(descriptor.get(), size);
  std::shared_ptr<Segment> segment(new Segment(std::move(descriptor), data, size));
  seal(segment->descriptor(), to_lend);  // this side's own mapping exists, and may write
  return segment;
}

std::shared_ptr<Segment> Segment::map(const Descriptor& descriptor, std::size_t max_size) {
  return adopt(descriptor, max_size, PROT_READ | PROT_WRITE);
}

std::shared_ptr<Segment> Segment::map_read_only(const Descriptor& descriptor,
                                                std::size_t max_size) {
  return adopt(descriptor, max_size, PROT_READ);
}

std::shared_ptr<Segment> Segment::adopt(const Descriptor& descriptor, std::size_t max_size,
                                        int protection) {
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  struct stat status{};
  if (seals < 0 || (seals & kSeals) != kSeals || ::fstat(descriptor.get(), &status) != 0 ||
      !is_in_tmpfs(descriptor.get())) {
    throw Exception(ErrorCode::wire, "a peer passed a descriptor that is not a sealed segment");
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  if (status.st_size <= 0 || size > max_size || size % page_size() != 0) {
    throw Exception(ErrorCode::wire, "a peer passed a segment of " +
                                         std::to_string(status.st_size) +
                                         " bytes (allowed: " + std::to_string(max_size) + ")");
  }
  std::byte* data = map_shared(descriptor.get(), size, protection);
  return std::shared_ptr<Segment>(new Segment({}, data, size));
}

Segment::Segment(Descriptor descriptor, std::byte* data, std::size_t size)
    : descriptor_(std::move(descriptor)), data_(data), size_(size) {}

Segment::~Segment() {
  ::munmap(data_, size_);
  if (private_ != nullptr) ::munmap(private_, size_);
}

bool Segment::make_private() noexcept {
  return private_ != nullptr && put_in_place(std::exchange(private_, nullptr));
}

void Segment::Unmap::operator()(std::byte* data) const noexcept { ::munmap(data, size); }

Segment::Copy Segment::begin_copy() const noexcept {
  void* copy = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return {copy == MAP_FAILED ? nullptr : static_cast<std::byte*>(copy), Unmap{size_}};
}

bool Segment::end_copy(Copy copy) noexcept {
  ::mprotect(copy.get(), size_, PROT_READ);
  return put_in_place(copy.release());
}

// Atomic: a thread that uses the memory meanwhile finds one mapping or the other.
bool Segment::put_in_place(std::byte* mapping) noexcept {
  if (::mremap(mapping, size_, size_, MREMAP_MAYMOVE | MREMAP_FIXED, data_) != MAP_FAILED) {
    return true;
  }
  ::munmap(mapping, size_);
  return false;
}

// An old size of zero requests a second mapping of shared memory, without a descriptor.
std::shared_ptr<Segment> Segment::map_again() const noexcept {
  void* mapping = ::mremap(data_, 0, size_, MREMAP_MAYMOVE);
  if (mapping == MAP_FAILED) return nullptr;
  try {
    return std::shared_ptr<Segment>(new Segment({}, static_cast<std::byte*>(mapping), size_));
  } catch (const std::bad_alloc&) {
    ::munmap(mapping, size_);
    return nullptr;
  }
}

void Segment::forbid() noexcept { ::mprotect(data_, size_, PROT_NONE); }

MutableBuffer Segment::buffer(std::size_t offset, std::size_t size) {
  return {shared_from_this(), data_ + offset, size};
}

}  // namespace moolink::memory
