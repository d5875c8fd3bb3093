#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "wire/path.h"

namespace moolink::rpc {

// Whether a peer with this host key is reachable at the address from here: shared memory and
// loopback only on the same host.
bool reachable(const std::string& address, bool same_host);
bool is_of(const std::string& address, wire::PathKind kind);
// The host of tcp://host:port, in brackets for IPv6; empty: none.
std::string_view host_of(std::string_view address);
// Addresses in the order to try them: shared memory first, the best path between hosts last,
// because it is for peers that are connected already.
void sort_by_preference(std::vector<std::string>& addresses);

}  // namespace moolink::rpc
