#include "io/doorbell.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace moolink::io {

Doorbell Doorbell::create() {
  Descriptor descriptor(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!descriptor) {
    throw Exception(ErrorCode::error,
                    std::string("cannot make a doorbell (eventfd): ") + std::strerror(errno));
  }
  return Doorbell(std::move(descriptor));
}

Doorbell Doorbell::adopt(Descriptor descriptor) {
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor.get());
  char target[64];
  const ssize_t length = ::readlink(link.c_str(), target, sizeof target);
  const int flags = ::fcntl(descriptor.get(), F_GETFL);
  if (length < 0 ||
      std::string_view(target, static_cast<std::size_t>(length)) != "anon_inode:[eventfd]" ||
      flags < 0 || (flags & O_NONBLOCK) == 0) {
    throw Exception(ErrorCode::wire, "a peer passed a doorbell that is no non-blocking eventfd");
  }
  return Doorbell(std::move(descriptor));
}

void Doorbell::ring() const {
  const std::uint64_t one = 1;
  // EAGAIN is the saturated counter; the watcher has edges enough. Nothing else can fail.
  [[maybe_unused]] const ssize_t written = ::write(descriptor_.get(), &one, sizeof one);
}

void Doorbell::silence() const {
  std::uint64_t rings = 0;
  // EAGAIN: there was none.
  [[maybe_unused]] const ssize_t got = ::read(descriptor_.get(), &rings, sizeof rings);
}

}  // namespace moolink::io
