#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/names.h"
#include "base/time.h"
#include "base/uid.h"
#include "rpc/actions.h"
#include "rpc/calls.h"
#include "rpc/dialler.h"
#include "rpc/messages.h"
#include "rpc/peers.h"
#include "rpc/shared.h"
#include "session/session.h"
#include "wire/payload.h"

namespace moolink::rpc {

// A name that no connected peer has yet, or of which it is not certain which peer is meant, with
// the messages and calls that wait for it.
struct Search {
  struct Waiting {
    Time until;
    session::OutgoingMessage message;
    Uid instance;       // for this one only; empty: any peer of the name
    std::string scope;  // of this group, if known
  };
  // The question in which groups there are peers of the name, until all have answered.
  struct Namesakes {
    std::set<Uid> asked;  // and have not answered
    std::set<std::string> groups;
  };
  std::uint64_t number = 0;
  PeerName of;
  std::deque<CallId> calls;
  std::deque<Waiting> services;
  Duration pause{};
  std::set<std::string, std::less<>> asked;  // names of peers
  Tried tried;
  std::optional<Namesakes> namesakes;
  bool found = false;      // a peer knows it
  bool reachable = false;  // ... and an address to try from here
};

// The record of a lost peer, or of an ended search, for explain().
struct Past {
  Time at{};
  std::string ended;  // empty: nothing waited for the name any more
  std::set<std::string, std::less<>> asked;
  Tried tried;
};

// Which peer a name means, and where it is. A name that no connected peer has is searched: the
// connected peers are asked for addresses, again and again, and these are dialled. Calls and
// service messages wait with the search, calls until their end, messages for evict_after.
//
// If groups with keys of their own have peers of equal names, a holder of a group's key may take
// any name. So a holder of the token calls a peer that holds a group's key by its name alone only
// once no connected holder of the token knows a namesake in another group; otherwise the call
// fails. A name with a group means a holder of the token only once no connected holder of the token
// knows a peer of the name in that group. Peers with a group's key meet no namesakes.
//
// The Node owns this, and tells it which peers come and go; Connections asks it to fail the calls
// whose peer refuses this one.
class Directory {
 public:
  Directory(Shared& shared, Peers& peers, Calls& calls, Dialler& dialler)
      : shared_(shared), peers_(peers), calls_(calls), dialler_(dialler) {}

  // The peer that a call goes to at once; null: it is not up, or not certain yet.
  Peer* receiver_of(const PeerName& of) const;
  // Whether a call by that name runs here.
  bool means_this(const PeerName& of) const;

  // The call waits for its peer, or fails if too many do.
  void add(Time now, const Call& call);
  // The message waits for that instance (empty: any peer of the name) of that group, if known.
  // Throws Exception{invalid_argument} if it is over the limits.
  void add(Time now, const std::string& name, session::OutgoingMessage message, const Uid& instance,
           const std::string& scope);
  // A message to the instance has been dropped.
  void undelivered(const Uid& instance);
  // The calls that wait for the name, or all, end in the error.
  void fail_calls(const std::string& name, bool all, const Error& error);
  // The timer of a search.
  void due(Time now, std::uint64_t number);
  // This peer closes: its calls have failed, and messages are dropped in silence.
  void close() { searches_.clear(); }

  // The peer is about to be up: drops what has waited for it too long.
  void expect(Time now, const Peer& peer);
  // The peer is up: sends what waited for its name, and asks it for other names. `features`: those
  // that both peers have.
  void met(Time now, Peer& peer, std::uint64_t features);
  void lost(Time now, Peer& peer, const std::string& why);
  void forget(const Peer& peer);

  // Messages of a peer. Throw Exception{wire} if it breaks the protocol.
  void directory_message(Time now, Peer& from, const wire::Payload& payload);
  void namesakes_message(Time now, Peer& from, const wire::Payload& payload);

  // ---- for dials and reports ----

  // Whether something waits for a peer of the name.
  bool searches(const std::string& name) const {
    const auto found = searches_.lower_bound({name, {}});
    return found != searches_.end() && found->first.name == name;
  }
  // The results of dials for a search of the name; null: there is none.
  Tried* tried(const std::string& name);
  const Search* find(const PeerName& of) const {
    const auto found = searches_.find(of);
    return found == searches_.end() ? nullptr : &found->second;
  }
  const Past* past(const std::string& name) const {
    const auto found = past_.find(name);
    return found == past_.end() ? nullptr : &found->second;
  }
  std::string why_unreached(const PeerName& of) const;
  std::vector<std::string> searched_names() const;

 private:
  // The search of the name, a new one if there is none.
  Search& search_for(Time now, const PeerName& of);
  bool may_ask(const Peer& peer, const Search& search) const;
  void ask_all_peers(Time now, Search& search);
  void ask(Time now, Peer& peer, const std::string& name);
  void send_services(Time now, Peer& peer, Search& search);
  void drop_overdue(Time now, Search& search);
  void tell_of(Time now, Peer& to, Found found);
  void found(Time now, const Peer& from, const Found& found);
  void remember(Time now, const std::string& name, Past past);

  void resume_calls(Time now, Search& search);
  void decide(Time now, Search& search);
  void ask_namesakes(Time now, Search& search);
  void tell_namesakes(Time now, Peer& to, const std::string& name);
  void exchange_namesakes(Time now, Peer& peer);
  void forget_meanings(const std::string& name, const std::string& group);

  Shared& shared_;
  Peers& peers_;
  Calls& calls_;
  Dialler& dialler_;
  std::uint64_t last_search_ = 0;
  std::map<PeerName, Search> searches_;
  // Names whose meaning was not certain, and the peers that they mean: this one, or one that is up.
  std::map<PeerName, Uid> meanings_;
  std::map<std::string, Past, std::less<>> past_;  // a few
};

// Why a call by name fails: several groups have a peer of that name.
std::string several_of(const std::string& name, const std::set<std::string>& groups);

}  // namespace moolink::rpc
