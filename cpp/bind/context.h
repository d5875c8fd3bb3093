#pragma once

// The runtime's context of this interpreter: its workers take the GIL, its log is Python's.

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>

#include "base/time.h"
#include "runtime/engine/context.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::bind {

namespace nb = nanobind;

// Made at first use, and again in a forked child. Throws Exception{closed} during shutdown.
std::shared_ptr<runtime::Context> default_context();
// Whether the interpreter's exit has ended the context.
bool is_shut_down();
// Closed at the interpreter's exit unless the user closes it.
void close_at_exit(const std::shared_ptr<runtime::RpcPeer>& peer);

// A waiting thread calls it about every 50 ms: on the main thread it runs Python's signal handlers,
// whose exceptions (KeyboardInterrupt) end the wait.
runtime::Engine::Interrupt signal_check();
// Seconds from now; none means for ever. Throws ValueError if negative or not a number.
Time deadline_after(std::optional<double> timeout);
Duration to_duration(double timeout);

}  // namespace moolink::bind
