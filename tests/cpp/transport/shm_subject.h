#pragma once

#include <memory>

#include "conformance.h"
#include "transport/shm/transport.h"

namespace moolink::transport {

// The transport that the tests of this folder's shm_*_test.cc are of.
inline const conformance::Subject& shm_subject() {
  static const conformance::Subject subject{
      "shm",
      [](Environment& environment) { return std::make_unique<shm::ShmTransport>(environment); },
      "shm://", "shm://a-host-without-a-name"};
  return subject;
}

}  // namespace moolink::transport
