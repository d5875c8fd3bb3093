#pragma once

#include <memory>
#include <string>
#include <vector>

#include "group/broker.h"
#include "runtime/engine/action_pump.h"
#include "runtime/peer/rpc_peer.h"
#include "runtime/peer/service_router.h"

namespace moolink::runtime {

// A broker on a peer: carries out the actions of the machine.
class BrokerPeer final : public Driven, private PeerObserver {
 public:
  BrokerPeer(std::shared_ptr<RpcPeer> rpc, group::BrokerConfig config);
  ~BrokerPeer() override;

  const std::shared_ptr<RpcPeer>& rpc() const { return rpc_; }

  // --- without the lock
  std::vector<std::string> groups();
  group::View view(const std::string& group);  // empty: no such group
  void close();
  bool closed();

  // --- Driven
  void tick(Time now) override;
  Time next_deadline() const override { return broker_.next_deadline(); }
  void describe(Time now, Describe how, std::string& text) const override;

 private:
  // `held`: if this throws, the destructors of members need the lock.
  BrokerPeer(const Engine::Lock& held, std::shared_ptr<RpcPeer> rpc, group::BrokerConfig config);
  void peer_down(const rpc::PeerDown& peer) override;
  void carry_out();
  void perform(group::Broker::Send& action);
  void perform(group::Broker::Log& action) {
    rpc_->context()->log(action.level, std::move(action.text));
  }

  std::shared_ptr<RpcPeer> rpc_;
  group::Broker broker_;
  ActionPump pump_;
  std::shared_ptr<void> routed_;  // until close()
  Listed<PeerObserver> observes_;
  Listed<Driven> driven_;
};

}  // namespace moolink::runtime
