#pragma once

#include <memory>
#include <optional>

#include "bind/context.h"
#include "runtime/engine/workers.h"

namespace moolink::bind {

// A blocking wait: lends its worker's slot meanwhile. Needs the GIL.
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
