#pragma once

#include <string>

#include "base/uid.h"

namespace moolink::io {

// The boot id of the running kernel, as text.
std::string boot_id();
// One kernel and one network namespace: processes with the same key reach one another over loopback
// and abstract sockets, others do not. Containers on one kernel have different keys.
Uid host_key();

}  // namespace moolink::io
