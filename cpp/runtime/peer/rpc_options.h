#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/limits.h"
#include "crypto/keyring.h"
#include "session/session.h"
#include "wire/path.h"

namespace moolink::runtime {

struct RpcOptions {
  std::string name;                                       // empty: the instance id
  std::optional<std::vector<wire::PathKind>> transports;  // none: transport::default_kinds()
  Limits limits;
  session::Timing timing;
  crypto::Keyring keyring;  // the keys that it shows and accepts; empty: insecure
  std::string key_origin;   // where the keys are from, for the user
};

}  // namespace moolink::runtime
