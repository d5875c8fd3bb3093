#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/time.h"
#include "group/view.h"

namespace moolink::accumulate {

// A soft view that waits, while the epoch before it is active, until the leader announces a
// boundary between two rounds (MOVE), and at most for a given time. A later view takes its place,
// without another wait. Owned by the Machine.
class PendingView {
 public:
  explicit PendingView(Duration longest_wait) : longest_wait_(longest_wait) {}

  void wait(Time now, group::SharedView view) {
    view_ = std::move(view);
    if (deadline_ == kNever) deadline_ = now + longest_wait_;
  }
  void boundary(std::uint64_t next) { boundary_ = std::max(boundary_, next); }
  void clear() {
    view_.reset();
    deadline_ = kNever;
  }

  std::uint64_t epoch() const { return view_ ? view_->epoch : 0; }  // 0: none waits
  // Null: none waits, or it has to wait on.
  group::SharedView due(Time now) const {
    return now >= deadline_ || boundary_ >= epoch() ? view_ : nullptr;
  }
  Time deadline() const { return deadline_; }

 private:
  Duration longest_wait_;
  group::SharedView view_;  // null: none
  Time deadline_ = kNever;
  std::uint64_t boundary_ = 0;  // was announced for this epoch
};

}  // namespace moolink::accumulate
