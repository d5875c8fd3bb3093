#pragma once

#include <nanobind/nanobind.h>

namespace moolink::bind {

void bind_replay(nanobind::module_& m);

}  // namespace moolink::bind
