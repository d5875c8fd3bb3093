#pragma once

#include <map>
#include <vector>

#include "accumulate/messages.h"
#include "base/uid.h"
#include "group/view.h"

namespace moolink::accumulate {

// The decision of a new epoch's coordinator from its members' facts: the rounds that stand, the
// survivors, the leader. A pure function, so every coordinator decides the same from the same
// facts.
struct Decision {
  Resume resume;
  std::vector<Contribution> lost;  // of peers outside the view, in no round that stands
};

// `flushes` has one entry for each member of the view, except perhaps its observers.
Decision decide(const group::View& view, const std::map<Uid, Flush>& flushes);

}  // namespace moolink::accumulate
