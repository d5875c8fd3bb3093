#pragma once

#include <cstddef>
#include <string>

#include "base/thread_safety.h"
#include "base/time.h"
#include "rpc/node.h"

namespace moolink::runtime {

// The state of a Node as human-readable lines: for moolink dump and for errors of time-outs.

inline constexpr std::size_t kMostLines = 50;  // of each list
inline constexpr std::size_t kMostWaits = 10;  // ... in the detail of an error

void describe_peers(const rpc::Node& node, Time now, std::string& text) MOOLINK_LOCKED;
void describe_calls(const rpc::Node& node, Time now, std::size_t most, const std::string& indent,
                    std::string& text) MOOLINK_LOCKED;
// A line about those of `all` entries that are beyond `most`, if there are any.
void describe_rest(std::string& text, const std::string& indent, std::size_t all, std::size_t most);

}  // namespace moolink::runtime
