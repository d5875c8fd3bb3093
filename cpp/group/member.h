#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/log.h"
#include "base/time.h"
#include "group/messages.h"
#include "group/view.h"

namespace moolink::group {

using moolink::Down;

struct MemberConfig {
  std::string group;
  MemberInfo self;        // instance, name, sort, host_key; role observer or member
  bool stateful = false;  // an accumulator's group: a joiner is a newcomer until set_has_state
  Duration announce_every = milliseconds(250);
  Duration evict_after = seconds(3);         // how long this member may be silent
  Duration late = milliseconds(500);         // own lateness that makes its clock unfit to judge ...
  Duration disarmed = seconds(1);            // ... of others' silence, for this long
  Duration suspicion_memory = seconds(10);   // of peers that left the view
  Duration probe_every = seconds(1);         // of members that are not reached
  Duration stale_every = milliseconds(250);  // between STALE answers to one peer
};

// How a member classifies a frame by its epoch.
enum class FrameEpoch : std::uint8_t {
  current,  // of the active epoch, from a member of it: apply it
  pending,  // of a view that is known and not active yet (hold_soft_views)
  older,    // refuse it; the sender was told the newer view (STALE)
  newer,    // of a view that has not arrived yet: keep it until it does, or drop it
};

// One peer's side of one group: a machine without I/O.
//
// Epochs. A view is accepted if its number is above every one seen and it contains this peer; the
// action NewView reports it to the owner. An accepted view becomes active at once, with one
// exception: after hold_soft_views(true) a soft view only becomes pending, the old epoch stays
// active, and the owner calls activate(epoch) at the boundary its leader names. A later view, hard
// or soft, replaces a pending one. A hard view ends the active epoch at once; an accumulator's
// FLUSH and RESUME then happen inside the new epoch, outside this machine.
//
// A view without this peer, or EXPEL, means eviction: action Evicted, the state counts as lost, and
// the member asks to join again as a new peer.
//
// The state (stateful groups). A peer joins as a newcomer; its owner calls set_has_state(true) once
// it holds the group's parameters (by snapshot, or as the peer elected after a view with cause
// `formed`, in which all are newcomers). The machine resets it on eviction, on a new lineage and on
// demotion: check has_state() after NewView.
class Member {
 public:
  struct SendToBroker {
    Buffer bytes;
  };
  struct SendToMember {
    Uid instance;
    std::string name;
    Buffer bytes;
  };
  struct NewView {
    SharedView view;
    bool active = true;  // false: pending, held until activate()
  };
  struct Evicted {
    std::uint64_t epoch = 0;  // the last epoch this peer was in
  };
  struct Log {
    LogLevel level = LogLevel::info;
    std::string text;
  };
  using Action = std::variant<SendToBroker, SendToMember, NewView, Evicted, Log>;

  Member(MemberConfig config, Time now);

  // From below.
  void tick(Time now);
  Time next_deadline() const;
  void broker_up(Time now, const Uid& instance);
  void broker_down(Time now);
  void peer_up(Time now, const Uid& instance);
  void peer_down(Time now, const Uid& instance, Down how);
  // A message of service 2 for this group (recipient_of). Throws ErrorCode::wire if malformed.
  void received(Time now, const Uid& from, std::span<const std::byte> bytes);

  // From the owner.
  void leave(Time now);  // tells the broker; the machine does nothing afterwards
  void set_sort_order(Time now, std::int64_t sort);
  void set_evict_after(Time now, Duration evict_after);
  void hold_soft_views(bool hold) { hold_ = hold; }
  // The group's members share a state from now on (config().stateful); `role` is this peer's part.
  void share_state(Time now, Role role);
  void activate(Time now, std::uint64_t epoch);
  void set_has_state(Time now, bool has_state);
  void ask_demotion(Time now, const Uid& instance);
  // Called with every frame of an operation before it is used.
  FrameEpoch check_frame(Time now, const Uid& from, std::string_view from_name,
                         std::uint64_t epoch);

  std::vector<Action> drain() { return std::exchange(actions_, {}); }

  const SharedView& active_view() const { return active_; }  // empty: none
  const SharedView& view() const { return view_; }           // the newest one, perhaps pending
  bool active() const { return !active_->empty(); }
  bool left() const { return left_; }
  bool has_state() const { return has_state_; }
  const MemberConfig& config() const { return config_; }
  // One sentence on what the group waits for; empty when it waits for nothing.
  std::string waiting_for() const;

 private:
  struct Unreachable {
    bool dead = false;
    Time since;
    Time probe_at;
  };

  void notice(Time now);
  void announce(Time now);
  void announce_soon(Time now) { next_announce_ = now; }
  bool suspects(Time now, const Unreachable& unreachable) const;
  std::vector<Suspicion> suspected(Time now) const;
  std::vector<Uid> gaps() const;
  void forget_old_suspicions(Time now);
  void probe(Time now);
  bool believes(const Uid& from, const View& view) const;
  void on_view(Time now, const Uid& from, const NewEpoch& made);
  void evicted(Time now, std::string_view why);
  void say(LogLevel level, std::string text) {
    actions_.push_back(Log{level, "group '" + config_.group + "': " + std::move(text)});
  }

  MemberConfig config_;
  SharedView view_ = no_view();
  SharedView active_ = no_view();
  Time lineage_began_{};
  std::uint64_t floor_ = 0;
  bool has_state_ = false;
  std::uint64_t state_epoch_ = 0;  // of view_ when the state was taken over
  bool hold_ = false;
  bool left_ = false;

  Uid broker_;              // empty: not connected
  bool send_view_ = false;  // with the next announcement
  std::string refusal_;     // the broker's last reason for not admitting this peer
  Time next_announce_;
  Time next_tick_;
  Time armed_at_;      // suspicions of silence count from then on
  bool armed_ = true;  // as of the last announcement
  std::map<Uid, Unreachable> unreachable_;
  std::set<Uid> lost_;  // members of the view with which a session was lost in this epoch
  std::map<Uid, Time> stale_sent_;
  std::vector<Action> actions_;
};

}  // namespace moolink::group
