#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/thread_safety.h"
#include "base/time.h"
#include "rpc/node.h"
#include "runtime/engine/context.h"
#include "runtime/peer/rpc_options.h"
#include "transport/transport.h"

namespace moolink::runtime {

// The transports of one peer, and where it listens. They are made by the first start(); until then
// the user may choose them, and no other peer reaches this one. Where a transport can listen beside
// another one, or beside a connection that was dialled, it does so unasked, and the Node announces
// the addresses. RpcPeer owns this and is the handler of the transports' events; all calls are made
// with the engine's lock. stop() ends it.
class PeerTransports {
 public:
  // `node` is told the paths and addresses. It and `handler` outlive this.
  PeerTransports(std::shared_ptr<Context> context, const RpcOptions& options,
                 transport::Handler& handler, rpc::Node& node);

  void set_name(const std::string& name) MOOLINK_LOCKED { environment_.name = name; }
  // Throws Exception{invalid_argument} after start().
  void choose(const std::vector<wire::PathKind>& kinds) MOOLINK_LOCKED;
  // The first listen or connect: from now on peers of this host can reach this one.
  void start() MOOLINK_LOCKED;

  // Throws Exception{invalid_argument} if no transport serves the address.
  transport::Transport& serving(const std::string& address) MOOLINK_LOCKED;
  // At as many of the addresses, which are those of one name, as is possible. Returns all at which
  // this peer can now be dialled; throws Exception if there is none.
  std::vector<std::string> listen(const std::vector<std::string>& addresses,
                                  const std::string& advertise) MOOLINK_LOCKED;
  // A peer that has dialled another can be dialled too, on the interface of the connection: others
  // learn the address from the peer at its other end.
  void listen_beside(const transport::Connection& connection) MOOLINK_LOCKED;

  // This process has no descriptor or memory for a waiting connection.
  void cannot_accept(Time now, const Error& error) MOOLINK_LOCKED;
  // Why this process cannot accept connections now; empty: it can.
  std::string why_none_connects(Time now) const MOOLINK_LOCKED {
    return now < not_accepted_until_ ? not_accepted_ : std::string();
  }

  // No more events follow. Returns what is to be destroyed without the lock.
  std::vector<std::unique_ptr<transport::Transport>> stop() MOOLINK_LOCKED;
  // In a forked child.
  void abandon() noexcept MOOLINK_LOCKED;

 private:
  void listen_unasked(const std::string& address) MOOLINK_LOCKED;
  void listen_on_companions(const std::vector<std::string>& bound) MOOLINK_LOCKED;

  const std::shared_ptr<Context> context_;
  rpc::Node& node_;
  std::optional<std::vector<wire::PathKind>> chosen_;  // by the user
  transport::Environment environment_;
  std::vector<std::unique_ptr<transport::Transport>> transports_;
  bool started_ = false;  // the transports exist
  std::set<wire::PathKind> listens_;
  std::string not_accepted_;          // why the last connection was not accepted
  Time not_accepted_until_ = Time{};  // until when this counts
};

}  // namespace moolink::runtime
