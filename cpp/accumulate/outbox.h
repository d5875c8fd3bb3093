#pragma once

#include <string>
#include <utility>
#include <vector>

#include "accumulate/actions.h"
#include "accumulate/epoch.h"
#include "accumulate/inbox.h"

namespace moolink::accumulate {

// The one place that the parts of a Machine write to: the actions in order, which the runtime takes
// after each event (Machine::take_actions). Messages get the envelope of the group and of the epoch
// of the moment; those of this peer to itself go to its own inbox, and the Machine handles them
// before the event ends. Owned by the Machine; it decides nothing, and nothing that was written is
// taken back.
class Outbox {
 public:
  using SnapshotMessage = decltype(SnapshotEnvelope::message);

  Outbox(std::string group, const Epoch& epoch, Inbox& own)
      : group_(std::move(group)), epoch_(epoch), own_(own) {}

  void act(Action action) { actions_.push_back(std::move(action)); }
  void send(const Uid& to, Message message, std::vector<Buffer> parts = {});
  void broadcast(const Message& message) {
    for (const group::MemberInfo& member : epoch_.view().members) send(member.instance, message);
  }
  void send_snapshot(const Uid& to, SnapshotMessage message, std::vector<Buffer> parts = {});
  void ask_for_view(const Uid& instance, const std::string& reason);
  void wake();
  void log(LogLevel level, std::string text) { act(Log{level, std::move(text)}); }

  std::vector<Action> take() { return std::exchange(actions_, {}); }

 private:
  std::string group_;
  const Epoch& epoch_;
  Inbox& own_;
  std::vector<Action> actions_;
};

}  // namespace moolink::accumulate
