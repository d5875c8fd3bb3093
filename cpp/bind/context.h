#pragma once

// The runtime's context of this interpreter: its workers take the GIL, its log is Python's.

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/time.h"
#include "bind/gil.h"
#include "runtime/engine/context.h"
#include "runtime/engine/workers.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::bind {

namespace nb = nanobind;

// Made at first use, and again in a forked child. Throws Exception{closed} during shutdown.
std::shared_ptr<runtime::Context> default_context();
// Whether the interpreter's exit has ended the context.
bool is_shut_down();
void log_info(std::string text);
// Closed at the interpreter's exit unless the user closes it.
void close_at_exit(const std::shared_ptr<runtime::RpcPeer>& peer);
// Closes the peer on a worker and waits up to 50 ms; the interpreter's exit waits for the rest.
void close_soon(const std::shared_ptr<runtime::RpcPeer>& peer);

// A waiting thread calls it about every 50 ms: on the main thread it runs Python's signal handlers,
// whose exceptions (KeyboardInterrupt) end the wait.
runtime::Engine::Interrupt signal_check();
// Seconds from now; none means for ever. Throws ValueError if negative or not a number.
Time deadline_after(std::optional<double> timeout);
Duration to_duration(double timeout);
// Calls wait(deadline, interrupt) without the GIL. `timeout`: as for deadline_after().
template <class Wait>
auto wait_unlocked(std::optional<double> timeout, Wait&& wait) {
  const Time deadline = deadline_after(timeout);
  const auto interrupt = signal_check();
  const GilRelease unlocked;
  return wait(deadline, interrupt);
}

// Lends the slot of a worker's thread during a blocking wait. Needs the GIL.
class LentSlot {
 public:
  LentSlot() = default;
  ~LentSlot() { exit(); }  // an exception ends the wait, too
  LentSlot(const LentSlot&) = delete;
  LentSlot& operator=(const LentSlot&) = delete;

  void enter() {
    if (!runtime::Workers::on_worker_thread() || is_shut_down()) return;
    context_ = default_context();
    const auto lock = context_->lock();
    lend_.emplace(context_->workers());
  }
  void exit() {
    if (!lend_) return;
    const auto lock = context_->lock();
    lend_.reset();
  }

 private:
  std::shared_ptr<runtime::Context> context_;
  std::optional<runtime::Workers::Lend> lend_;
};

}  // namespace moolink::bind
