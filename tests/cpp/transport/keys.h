#pragma once

#include <cstdint>
#include <cstring>

#include "crypto/keyring.h"

namespace moolink::transport {

// A job's key; another one for each number.
inline crypto::Key key_of(std::uint64_t number) {
  crypto::Key key;
  std::memcpy(key.secret.data(), &number, sizeof number);
  return key;
}

}  // namespace moolink::transport
