#include "accumulate/outbox.h"

#include <variant>

#include "accumulate/hostile_messages.h"

namespace moolink::accumulate {

void Outbox::send(const Uid& to, Message message, std::vector<Buffer> parts) {
  Envelope envelope{group_, epoch_.number(), std::move(message)};
  if (to == epoch_.self()) return own_.push({to, std::move(envelope), std::move(parts)});
  lie_in(envelope.message);
  act(Send{to, epoch_.name_of(to), kAccumulateService, {wire::encode(envelope), std::move(parts)}});
}

void Outbox::send_snapshot(const Uid& to, SnapshotMessage message, std::vector<Buffer> parts) {
  lie_in(message);
  const SnapshotEnvelope envelope{group_, std::move(message)};
  act(Send{to, epoch_.name_of(to), kSnapshotService, {wire::encode(envelope), std::move(parts)}});
}

void Outbox::ask_for_view(const Uid& instance, const std::string& reason) {
  log(LogLevel::warning, epoch_.name_of(instance) + " holds up the group: " + reason);
  act(Demote{instance});
}

void Outbox::wake() {
  if (actions_.empty() || !std::holds_alternative<Wake>(actions_.back())) act(Wake{});
}

}  // namespace moolink::accumulate
