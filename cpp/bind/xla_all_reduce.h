#pragma once

#include <nanobind/nanobind.h>

namespace moolink::bind {

// The handler of the custom call moolink.jax.all_reduce.
void bind_xla(nanobind::module_& m);

}  // namespace moolink::bind
