#pragma once

#include <nanobind/nanobind.h>

namespace moolink::bind {

void bind_accumulator(nanobind::module_& m);

}  // namespace moolink::bind
