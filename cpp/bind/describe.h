#pragma once

// Descriptions of peers and paths as dicts; moolink/reports/peers.py names their fields.

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "rpc/actions.h"
#include "rpc/node.h"
#include "runtime/group/accumulator_peer.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::bind {

namespace nb = nanobind;

double in_seconds_of(Duration duration);

nb::dict describe(const runtime::RpcStats& stats);
nb::dict describe(const runtime::AccumulatorPeer::Phases& phases);
nb::list describe(const std::vector<rpc::PeerInfo>& peers);
nb::dict describe(const rpc::Explanation& known);

// " at " the addresses, for representations; without those of shared memory if there are others.
std::string places_text(const std::vector<std::string>& addresses);

}  // namespace moolink::bind
