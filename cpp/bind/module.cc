#include <nanobind/nanobind.h>

#include "bind/errors.h"
#include "bind/value.h"

NB_MODULE(_core, m) {
  moolink::bind::bind_errors(m);
  moolink::bind::bind_values(m);
}
