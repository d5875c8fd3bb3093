#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/random.h"
#include "base/time.h"
#include "group/broker_actions.h"
#include "group/member.h"
#include "group/view.h"

namespace moolink::group {

class Roster;
struct Announce;
struct RosterTiming;

// The only maker of epochs, for any number of groups. Soft state: its members can report again
// everything it knows. A machine without I/O.
class Broker {
 public:
  using Send = BrokerSend;
  using Log = BrokerLog;
  using Action = BrokerAction;

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
