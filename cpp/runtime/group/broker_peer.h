#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/thread_safety.h"
#include "group/broker.h"
#include "runtime/engine/action_pump.h"
#include "runtime/peer/rpc_peer.h"
#include "runtime/peer/service_router.h"

namespace moolink::runtime {

// A broker on a peer: carries out the actions of the machine.
class BrokerPeer : public Driven, private PeerObserver {
 public:
  BrokerPeer(std::shared_ptr<RpcPeer> rpc, group::BrokerConfig config);
  ~BrokerPeer() override;

  const std::shared_ptr<RpcPeer>& rpc() const { return rpc_; }

  std::vector<std::string> groups() MOOLINK_UNLOCKED;
  group::View view(const std::string& group) MOOLINK_UNLOCKED;  // empty: no such group
  void close() MOOLINK_UNLOCKED;
  bool closed() MOOLINK_UNLOCKED;

  // --- Driven
  void tick(Time now) MOOLINK_LOCKED override;
  Time next_deadline() const MOOLINK_LOCKED override { return broker_.next_deadline(); }
  void describe(Time now, Describe how, std::string& text) const MOOLINK_LOCKED override;

 private:
  // `held`: if this throws, the destructors of members need the lock.
  BrokerPeer(const Engine::Lock& held, std::shared_ptr<RpcPeer> rpc, group::BrokerConfig config);
  void peer_down(const rpc::PeerDown& peer) MOOLINK_LOCKED override;
  void carry_out() MOOLINK_LOCKED;
  void perform(group::Broker::Send& action) MOOLINK_LOCKED;
  void perform(group::Broker::Log& action) MOOLINK_LOCKED {
    rpc_->context()->log(action.level, std::move(action.text));
  }

  std::shared_ptr<RpcPeer> rpc_;
  group::Broker broker_ MOOLINK_GUARDED;
  ActionPump pump_;
  std::shared_ptr<void> routed_ MOOLINK_GUARDED;  // until close()
  Listed<PeerObserver> observes_ MOOLINK_GUARDED;
  Listed<Driven> driven_ MOOLINK_GUARDED;
};

}  // namespace moolink::runtime
