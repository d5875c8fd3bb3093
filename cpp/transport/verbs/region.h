#pragma once

#include <cstdint>
#include <string>

#include "transport/verbs/library.h"

namespace moolink::transport::verbs {

// Memory that a device may read, and write if requested. Its destruction ends the registration.
class Region {
 public:
  Region() = default;
  // Null: an empty one.
  Region(const Library& library, ibv_mr* region) : library_(&library), region_(region) {}
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { reset(); }

  explicit operator bool() const { return region_ != nullptr; }
  std::uint32_t local_key() const { return region_->lkey; }
  std::uint32_t remote_key() const { return region_->rkey; }
  void reset();

 private:
  const Library* library_ = nullptr;
  ibv_mr* region_ = nullptr;
};

// "Cannot allocate memory", with the limit on locked memory where that may be the reason.
std::string registration_failure(int error);

}  // namespace moolink::transport::verbs
