#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/time.h"
#include "group/broker_actions.h"
#include "group/messages.h"
#include "group/view.h"

namespace moolink::group {

// The time of an event, and whether the broker's clock is reliable then.
struct RosterTiming {
  Time now;
  Time gathered_at;   // no group leaves the gathering phase before
  bool armed = true;  // whether the broker ran in time lately, so that silence counts
};

// What a broker knows about one group, and the decisions about its next view.
//
// Gathering: announcements come in, nothing is decided. Then the broker adopts the highest
// announced view or, if there is none, founds a lineage. Formed: from then on every view is made
// from the one before, minus the members that died, left, fell silent or were suspected, plus the
// peers that ask to join. A group that has lost all members gathers again.
class Roster {
 public:
  using Timing = RosterTiming;

  // The broker owns the references; they outlive the roster.
  Roster(std::string group, const BrokerConfig& config, Random& random,
         std::vector<BrokerAction>& actions);

  void announced(const Timing& timing, const Uid& from, Announce announce);
  void left(const Uid& from) { lost(from, Cause::left); }
  void demotion_asked(const Uid& from, const Demote& demote);
  void peer_dead(const Uid& instance, Down how) {
    lost(instance, how == Down::closed ? Cause::left : Cause::died);
  }
  bool has_news() const { return news_; }
  // Decides on all facts since the last decision.
  void decide(const Timing& timing);

  const View& view() const { return view_; }
  bool idle() const { return peers_.empty(); }
  Time last_event() const { return last_event_; }

 private:
  struct Peer {
    Announce last;
    Time lineage_began{};       // of the lineage of `last`
    std::optional<View> claim;  // the view it announced, if it sent it
    Time heard;
    bool excused = false;              // the broker itself was cut off since this peer was heard
    std::uint64_t order = 0;           // of joining
    std::uint64_t since = 0;           // epoch in which it joined or became a newcomer
    std::optional<Cause> gone;         // to be left out of the next view
    bool unheard = false;              // known only from another peer's view: `last` is a guess
    std::optional<Time> suspected_at;  // enough members suspect it of silence since then
    bool demotion_asked = false;
    bool demote = false;  // to be a newcomer in the next view
    Time resend_at = Time::min();
    Time refuse_at = Time::min();
  };
  // The suspicions that count against one peer.
  struct Reports {
    std::size_t count = 0;
    std::size_t dead = 0;         // of them, proofs of death
    const Peer* first = nullptr;  // a reporter, until one is evicted
  };
  struct Suspect {
    const MemberInfo* member;
    Peer* peer;
    const Reports* reports;
  };
  // A summary, for one decision, of the members that this broker hears. evict() keeps it current.
  struct Heard {
    std::size_t reporting = 0;  // members whose suspicions count
    std::size_t holders = 0;    // of the state
    std::map<Uid, Reports> reports;
  };

  void hear_again(const Timing& timing);
  bool changed(const Announce& before, const Announce& after) const;
  void lost(const Uid& instance, Cause cause);
  void forget_silent_outsiders(const Timing& timing);
  void send(const Uid& instance, const std::string& name, Buffer bytes) {
    actions_.push_back(BrokerSend{instance, name, group_, std::move(bytes)});
  }
  void tell(const Peer& peer, decltype(Message::body) body) {
    const MemberInfo& self = peer.last.self;
    send(self.instance, self.name, wire::encode(Message{group_, std::move(body)}));
  }
  void say(LogLevel level, std::string text) {
    actions_.push_back(BrokerLog{level, "group '" + group_ + "': " + std::move(text)});
  }

  // roster_lineage.cc: the view to continue from
  void end_gathering(const Timing& timing);
  void adopt(const Timing& timing, const Uid& claimant);
  void found(const Timing& timing);
  void put_right(const Timing& timing, const Uid& instance);
  void put_right_member(const Timing& timing, const Uid& instance, Peer& peer);
  void supersede(const Timing& timing, const Uid& claimant);
  bool ended(const Announce& announce) const;
  bool yields_to(const Timing& timing, const Peer& peer) const;

  // roster_judge.cc: which members are gone, which peers may join
  bool in_view(const Uid& instance) const { return view_.find(instance) != nullptr; }
  bool reachable(const Timing& timing, const Peer& peer) const;
  bool holds_state(const Peer& peer) const;
  bool may_hold_state(const Peer& peer) const {
    return holds_state(peer) || (peer.unheard && peer.last.self.role != Role::observer);
  }
  static bool reporting(bool reachable, const MemberInfo& member);
  Heard heard(const Timing& timing) const;
  bool last_holder(const Timing& timing, const Heard& heard, const Peer& peer) const;
  static bool condemned(const Heard& heard, const Reports& reports, bool is_reporting);
  void evict(const Timing& timing, Heard& heard, const MemberInfo& member, Cause cause);
  void find_gaps();
  void find_replaced(const Timing& timing);
  void find_silent(const Timing& timing, const Heard& heard);
  void find_suspected(const Timing& timing, Heard& heard);
  void find_demoted(const Timing& timing, Heard& heard);
  const Suspect* worst_of(const Timing& timing, const Heard& heard,
                          const std::vector<Suspect>& suspects) const;
  std::vector<Uid> joiners(const Timing& timing);
  bool admissible(const Timing& timing, const Heard& heard, const Uid& instance, Peer& peer);
  void refuse(const Timing& timing, Peer& peer, std::string reason);

  // roster.cc: making views
  Role role_of(const Peer& peer) const;
  bool order_changed() const;
  std::uint64_t next_epoch();
  std::optional<Cause> hard_cause() const;
  void make_view(const Timing& timing, const std::vector<Uid>& joined, Cause cause, bool soft);
  std::vector<MemberInfo> take_out_gone();
  void dissolve(const Timing& timing);
  bool renew_lineage(const Timing& timing);
  NewEpoch new_epoch(const Timing& timing) const { return {view_, timing.now - lineage_began_}; }
  void publish(const Timing& timing, const std::vector<MemberInfo>& evicted);

  std::string group_;
  const BrokerConfig& config_;
  Random& random_;
  std::vector<BrokerAction>& actions_;

  bool formed_ = false;
  bool news_ = false;               // there are facts since the last decision
  bool repair_ = false;             // a view must be made though no member joined or left
  bool issued_ = false;             // this broker made the view's number itself
  bool lineage_has_state_ = false;  // a member has held the state of this lineage
  std::uint64_t floor_ = 0;         // the highest epoch announced or made
  std::uint64_t next_order_ = 0;
  View view_;
  Time soft_at_ = Time::min();  // no soft view before
  std::optional<Time> opened_;  // first announcement while gathering
  Time lineage_began_{};        // the view's; announced by its members if another broker made it
  std::uint64_t held_ = 0;      // the highest epoch of the view's lineage that a peer announced
  // Lineages that ended under this broker, with the first epoch whose members, if only silent, may
  // still bring them back.
  std::map<Uid, std::uint64_t> ended_;
  std::map<Uid, Peer> peers_;
  Time last_event_;  // an announcement of any peer
};

}  // namespace moolink::group
