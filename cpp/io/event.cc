#include "io/event.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "base/system_error.h"

namespace moolink::io {

Event::Event() : descriptor_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!descriptor_) throw_system_error("cannot make an eventfd");
}

void Event::set() const {
  const std::uint64_t one = 1;
  // EAGAIN is the saturated counter; the watcher has edges enough. Nothing else can fail.
  [[maybe_unused]] const ssize_t written = ::write(descriptor_.get(), &one, sizeof one);
}

void Event::clear() const {
  std::uint64_t times = 0;
  // EAGAIN: it was not set.
  [[maybe_unused]] const ssize_t got = ::read(descriptor_.get(), &times, sizeof times);
}

}  // namespace moolink::io
