#pragma once

#include <nanobind/nanobind.h>

namespace moolink::bind {

// Each adds its part to the module.
void bind_errors(nanobind::module_& m);
void bind_values(nanobind::module_& m);
void bind_device(nanobind::module_& m);
void bind_context(nanobind::module_& m);
void bind_lending(nanobind::module_& m);
void bind_future(nanobind::module_& m);
void bind_stream(nanobind::module_& m);
void bind_completions(nanobind::module_& m);
void bind_deferred(nanobind::module_& m);
void bind_rpc(nanobind::module_& m);
void bind_broker(nanobind::module_& m);
void bind_group(nanobind::module_& m);
void bind_tensor_layouts(nanobind::module_& m);
void bind_shared_words(nanobind::module_& m);
void bind_environment_rows(nanobind::module_& m);
void bind_pool_batch(nanobind::module_& m);
void bind_batch_rows(nanobind::module_& m);
void bind_accumulator(nanobind::module_& m);
void bind_replay(nanobind::module_& m);
void bind_xla(nanobind::module_& m);

}  // namespace moolink::bind
