#pragma once

#include <nanobind/nanobind.h>

#include "replay/table.h"

namespace moolink::bind {

// The state of a replay's table as a dict of numpy arrays, for checkpoints.
nanobind::dict to_dict(const replay::TableState& state);
// Throws Exception{invalid_argument} if the arrays do not belong to one another.
replay::TableState table_state(const nanobind::dict& state);

}  // namespace moolink::bind
