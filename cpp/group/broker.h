#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "base/log.h"
#include "base/random.h"
#include "base/time.h"
#include "group/member.h"
#include "group/view.h"

namespace moolink::group {

class Roster;
struct Announce;
struct RosterTiming;

struct BrokerConfig {
  // After a start, announcements are only gathered for this long, so that all members of a group
  // that outlived an earlier broker are heard before any decision. Zero for a broker that is known
  // to be the first one (embedded by `moolink run`).
  Duration gather = seconds(1);
  Duration coalesce = milliseconds(250);  // between views that only add peers
  Duration tick_every = milliseconds(50);
  Duration late = milliseconds(500);    // own lateness that makes its clock unfit to judge ...
  Duration disarmed = seconds(1);       // ... others' silence, for this long
  Duration suspect_after = seconds(1);  // silent this long: its name may be taken over
  Duration suspected_for = milliseconds(500);  // suspicions of silence must last, to count
  Duration abandon_after = seconds(10);   // silence that removes even the last holder of the state
  Duration lineage_settle = seconds(10);  // a lineage younger than this yields to an older one
  Duration resend_every = milliseconds(200);
  Duration forget_after = seconds(600);  // a group without members
  std::size_t most_groups = 4096;
};

// The only maker of epochs, for any number of groups. Soft state: its members can report again
// everything it knows. A machine without I/O.
class Broker {
 public:
  struct Send {
    Uid instance;
    std::string name;
    std::string group;
    Buffer bytes;
  };
  struct Log {
    LogLevel level = LogLevel::info;
    std::string text;
  };
  using Action = std::variant<Send, Log>;

  Broker(BrokerConfig config, std::uint64_t seed, Time now);
  ~Broker();

  void tick(Time now);
  // When tick() must be called. After an event this is at once, so that one tick judges all events
  // of a turn.
  Time next_deadline() const { return std::min(next_tick_, judge_at_); }
  // Decides for all groups with news; a part of tick().
  void judge(Time now);
  // Silence is judged by the announcements alone; `unreachable` from below changes nothing.
  void peer_down(Time now, const Uid& instance, Down how);
  // A message of service 2 for a broker (recipient_of). Throws ErrorCode::wire if malformed.
  void received(Time now, const Uid& from, std::span<const std::byte> bytes);

  std::vector<Action> drain() { return std::exchange(actions_, {}); }

  // For the status page and tests, in order of name.
  std::vector<std::string> groups() const;
  const View* view(std::string_view group) const;  // null: no such group

 private:
  void notice(Time now);
  RosterTiming timing(Time now) const;
  void refuse(const Uid& from, const Announce& announce, const std::string& group);

  BrokerConfig config_;
  Random random_;
  Time started_;
  Time next_tick_;          // for all groups
  Time judge_at_ = kNever;  // for groups with news
  Time armed_at_;           // silence counts from then on
  std::map<std::string, std::unique_ptr<Roster>, std::less<>> rosters_;
  std::vector<Action> actions_;
};

}  // namespace moolink::group
