#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/time.h"
#include "base/uid.h"
#include "rpc/actions.h"
#include "rpc/peers.h"
#include "rpc/shared.h"
#include "session/session.h"
#include "wire/payload.h"

namespace moolink::rpc {

// Items that a caller may allow at once. A caller that allows more and takes none would make this
// side keep them: only credit holds items back.
inline constexpr std::uint64_t kMostCredit = 1024;

// The functions of this peer, and the handlers that run here: one entry for each call, of another
// peer or of this one, from its RunHandler until its reply, its time limit, its CANCEL or the end
// of its caller's session. What ends without a reply emits CancelHandler. It holds calls and
// handlers back of a peer that makes more than it takes results of: Peer::held, handlers_held. The
// Node owns it and passes it the messages of peers and the replies; Calls uses it for calls of this
// node to itself.
class Handlers {
 public:
  Handlers(Shared& shared, Peers& peers) : shared_(shared), peers_(peers) {}

  // `group`: peers confined to another one cannot call it.
  void define(const std::string& function, const std::string& group) {
    functions_[function] = group;
  }
  void undefine(const std::string& function) { functions_.erase(function); }
  bool defines(const std::string& function) const { return functions_.contains(function); }

  // A call of this node to itself; its function is defined. `credit` above 0: of a stream.
  void run_here(CallId id, const std::string& function, wire::Payload arguments, Time deadline,
                std::uint64_t credit);
  // Messages of a peer. Throw Exception{wire} if it breaks the protocol.
  void delivered_call(Time now, Peer& peer, session::Deliver& delivered);
  void delivered_cancel(Peer& peer, const session::Deliver& delivered);
  void delivered_credit(const Peer& peer, const session::Deliver& delivered);
  // The caller of a stream takes items up to `allowed` in all.
  void take_credit(const CallKey& key, std::uint64_t allowed);

  // The number of the next item of a stream, which counts as sent; none: the caller does not wait
  // any more. Throws Exception{invalid_argument} beyond the caller's credit.
  std::optional<std::uint64_t> number_item(const CallKey& key);
  // Sends the next item to the peer that calls; false: it does not wait any more. Throws as
  // number_item().
  bool send_item(Time now, const CallKey& key, wire::Payload item);
  // The handler has replied: ends the entry and returns how many items it has sent; none: the
  // caller does not wait any more.
  std::optional<std::uint64_t> end(const CallKey& key);
  void send_result(Time now, Peer& peer, CallId id, Reply reply, std::uint64_t items = 0);
  // Ends the entry without a reply.
  void stop(const CallKey& key, bool tell_handler);
  void stop_all_of(const Uid& caller);

  // Tells a peer with too many calls here to hold them, and to continue when half are done.
  void balance_window(Time now, Peer& peer);
  // Holds back the peer's handlers that have not begun while too many results wait for it. Its
  // calls that are here already come too late for WINDOW, and each may make a large result.
  void balance_handlers(Peer& peer);

  bool counts(const Timer& timer) const {
    const auto found = running_.find({timer.instance, timer.id});
    return found != running_.end() && found->second.deadline == timer.at;
  }

 private:
  struct Items {
    std::uint64_t allowed = 0;
    std::uint64_t sent = 0;
  };
  struct Running {
    Time deadline = kNever;
    std::size_t bytes = 0;
    std::optional<Items> stream;
  };

  Items* within_credit(const CallKey& key);
  bool ignores_window(Peer& peer, std::size_t bytes) const;

  Shared& shared_;
  Peers& peers_;
  std::map<std::string, std::string, std::less<>> functions_;  // and the group that may call each
  std::map<CallKey, Running> running_;
};

}  // namespace moolink::rpc
