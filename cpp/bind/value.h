#pragma once

// Python values <-> messages.

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "base/buffer.h"
#include "base/limits.h"
#include "bind/device.h"
#include "bind/lending.h"
#include "bind/tensor.h"
#include "wire/payload.h"

namespace moolink::bind {

struct ValueOptions {
  bool allow_pickle = false;  // both sides must allow it
  ArrayKind arrays = ArrayKind::same;
  DeviceChoice device;
  Limits limits;
  std::shared_ptr<CopyCounts> copies;  // may be null
  bool reads_only = false;  // decoded arrays are only read, so torch's may be lent memory too
};

// Captures a value: later changes to it have no effect. Tensors' elements are copied to memory from
// the allocator, large ones without the GIL. Raises TypeError for types that do not travel and
// ValueError for values that are nested too deeply (or contain themselves) or exceed a limit.
// Arrays inside a Lent are not copied if they have no gaps: the payload refers to them;
// `lender->released` tells the lender. Without a lender that raises TypeError.
wire::Payload encode_value(nb::handle value, const ValueOptions& options, Allocator& allocator,
                           Lender* lender = nullptr);

// Builds the value. Parts become arrays that own them: a received payload is used once. Lent ones
// become arrays that cannot be written (numpy) or copies (torch, JAX). Throws ErrorCode::wire for
// anything that does not decode, whichever side is to blame.
nb::object decode_value(const wire::Payload& payload, const ValueOptions& options);

// A call's arguments travel as the tuple (args, kwargs).
wire::Payload encode_call(nb::tuple args, nb::dict kwargs, const ValueOptions& options,
                          Allocator& allocator, Lender* lender = nullptr);
std::pair<nb::tuple, nb::dict> decode_call(const wire::Payload& payload,
                                           const ValueOptions& options);

}  // namespace moolink::bind
