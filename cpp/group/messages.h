#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/time.h"
#include "group/view.h"
#include "wire/archive.h"

namespace moolink::group {

// The age of a lineage travels as a duration, since no two hosts share a clock. An impossible age
// is clamped.
inline Time began(Time now, Duration age) {
  constexpr Duration kMost = std::chrono::hours(24 * 365);
  return now - std::clamp(age, Duration(0), kMost);
}

struct Suspicion {
  Uid instance;
  bool dead = false;  // proof of death; otherwise silent

  bool operator==(const Suspicion&) const = default;

  auto fields() { return std::tie(instance, dead); }
};

// member -> broker, every 250 ms and at once when anything in it changes. Epoch 0 asks to join.
struct Announce {
  MemberInfo self;          // role: observer, or member (the broker decides about newcomers)
  bool stateful = false;    // the group's members share a state that newcomers receive
  bool has_state = false;   // this peer has it, as of `epoch` of `lineage`
  Uid lineage;              // of the last view
  Duration lineage_age{};   // since it was made, as far as this peer knows
  std::uint64_t epoch = 0;  // of the last view with this peer
  std::uint64_t floor = 0;  // the highest epoch ever seen: only higher views are accepted
  Duration evict_after{};   // how long this peer may be silent
  std::vector<Suspicion> suspected;
  // Members of the last view that are reached again after their session was lost: messages of this
  // epoch are missing between the two.
  std::vector<Uid> gaps;
  std::optional<View> view;  // the last view, in the first announcement to a broker and on RESEND

  auto fields() {
    return std::tie(self, stateful, has_state, lineage, lineage_age, epoch, floor, evict_after,
                    suspected, gaps, view);
  }
};

// member -> broker
struct Leave {};

// member (the leader) -> broker: make `instance` a newcomer, because it holds up the others.
struct Demote {
  std::uint64_t epoch = 0;
  Uid instance;

  auto fields() { return std::tie(epoch, instance); }
};

// broker -> members, and members just evicted
struct NewEpoch {
  View view;
  Duration lineage_age{};

  auto fields() { return std::tie(view, lineage_age); }
};

// member -> member, the answer to a frame of an older epoch
struct Stale : NewEpoch {};

// broker -> a peer whose announced epoch continued without it: join again as a new peer.
struct Expel {
  std::uint64_t epoch = 0;  // the announced one; the message is void for any other
  std::uint64_t floor = 0;  // the group's own; views up to it are outdated, from any peer

  auto fields() { return std::tie(epoch, floor); }
};

// broker -> a peer that asks to join and cannot be admitted now; it keeps asking.
struct Refused {
  std::string reason;

  auto fields() { return std::tie(reason); }
};

// broker -> member: announce again, with the view.
struct Resend {};

// member -> member that it does not reach: a receiver is reached again.
struct Probe {};

// Every message of service 2.
struct Message {
  std::string group;
  std::variant<Announce, Leave, Demote, NewEpoch, Stale, Expel, Refused, Resend, Probe> body;

  auto fields() { return std::tie(group, body); }
};

// The addressee of a message, for dispatch: one process may hold a broker and members.
struct Recipient {
  std::string group;
  bool broker = false;  // else the member of `group`
};

// Throws ErrorCode::wire: malformed, or longer than any group needs.
inline Recipient recipient_of(std::span<const std::byte> bytes) {
  // A view of a hundred thousand members. The broker keeps each member's last announcement.
  constexpr std::size_t kMostBytes = std::size_t{16} << 20;
  static_assert(std::is_same_v<std::variant_alternative_t<3, decltype(Message::body)>, NewEpoch>,
                "the messages to the broker come first");
  if (bytes.size() > kMostBytes) {
    throw Exception(ErrorCode::wire, "a group's message has " + std::to_string(bytes.size()) +
                                         " bytes, more than any group needs");
  }
  wire::Reader reader(bytes);
  Recipient recipient;
  reader(recipient.group);
  recipient.broker = reader.varint() < 3;
  return recipient;
}

}  // namespace moolink::group
