#include "transport/verbs/region.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace moolink::transport::verbs {

std::string registration_failure(int error) {
  std::string text = std::strerror(error);
  rlimit limit{};
  const bool may_be_limit = error == ENOMEM || error == EAGAIN || error == EPERM;
  if (!may_be_limit || getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return text;
  }
  return text + "; this process may lock " + std::to_string(limit.rlim_cur >> 10) +
         " KB only: raise it (ulimit -l unlimited, or LimitMEMLOCK=infinity of its service)";
}

Region::Region(Region&& other) noexcept
    : library_(other.library_), region_(std::exchange(other.region_, nullptr)) {}

Region& Region::operator=(Region&& other) noexcept {
  if (this != &other) {
    reset();
    library_ = other.library_;
    region_ = std::exchange(other.region_, nullptr);
  }
  return *this;
}

void Region::reset() {
  if (region_ != nullptr) library_->dereg_mr(std::exchange(region_, nullptr));
}

}  // namespace moolink::transport::verbs
