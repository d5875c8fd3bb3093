#pragma once

// What is known of peers and paths as dicts; moolink/_core.pyi names their fields.

#include <nanobind/nanobind.h>

#include <vector>

#include "rpc/explain.h"
#include "rpc/node.h"
#include "runtime/rpc_peer.h"

namespace moolink::bind {

namespace nb = nanobind;

nb::dict describe(const runtime::RpcStats& stats);
nb::list describe(const std::vector<rpc::PeerInfo>& peers);
nb::dict describe(const rpc::Explanation& known);

}  // namespace moolink::bind
