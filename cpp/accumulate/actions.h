#pragma once

// The actions of a Machine (machine.h), which its runtime carries out in order.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "accumulate/messages.h"
#include "base/buffer.h"
#include "base/error.h"
#include "base/log.h"
#include "base/progress.h"
#include "collective/epoch_members.h"
#include "wire/payload.h"

namespace moolink::accumulate {

struct Send {
  Uid instance;
  std::string name;
  std::uint8_t service = kAccumulateService;  // or kSnapshotService
  wire::Payload payload;
};
// Give these members to the engine of the rounds (Engine::set_members), which fails unfinished
// rounds. Without members (epoch 0) nothing can be reduced until the next one.
struct EnterEpoch {
  collective::SharedMembers members;  // observers are the last
};
// Sum the contributions of a round over the members of `epoch` and call reduced(). `inputs` are
// this member's own buckets (none: zeros), each already multiplied by its batch size; divide the
// result once by `total`.
struct Reduce {
  std::uint64_t epoch = 0;
  std::uint64_t round = 0;
  std::int64_t total = 0;
  std::vector<Buffer> inputs;
  Written written;                          // how far the inputs are written
  std::vector<std::uint32_t> contributors;  // ranks in EnterEpoch's order
  std::uint64_t shared = 0;  // number of the reduction in the epoch's segment; 0: over messages
};
// This peer was evicted or demoted: contributions that it will not offer again. It does not know
// whether the others kept a round with one of them.
struct Dropped {
  std::vector<std::uint64_t> k;
};
// Contributions of dead members, in no round; for stats["lost"].
struct Lost {
  std::vector<Contribution> contributions;
};
// Parameters differ after `round`: these members' from the leader's.
struct Divergence {
  std::uint64_t round = 0;
  std::vector<std::string> names;
  bool here = false;  // this is one of them
};
// Ask the group's broker for a new view with this member as newcomer: Member::ask_demotion(). The
// change of epoch decides about its state; HasState tells the outcome.
struct Demote {
  Uid instance;
};
// Enter a soft view that the group's member holds back: Member::activate().
struct Activate {
  std::uint64_t epoch = 0;
};
// Whether this peer has the group's state: Member::set_has_state().
struct HasState {
  bool has_state = false;
};
// That peer sent a frame of an older epoch: Member::check_frame(), which answers STALE.
struct StaleFrame {
  Uid instance;
  std::uint64_t epoch = 0;
};
// This peer's configuration cannot take part (another layout, other settings); the error says
// what to do. With code none, it can take part again.
struct Failed {
  Error error;
};
// User-visible state may have changed: wake the threads that wait in update().
struct Wake {};
struct Log {
  LogLevel level = LogLevel::info;
  std::string text;
};
using Action = std::variant<Send, EnterEpoch, Reduce, Dropped, Lost, Divergence, Demote, Activate,
                            HasState, StaleFrame, Failed, Wake, Log>;

}  // namespace moolink::accumulate
