#include "runtime/broker_peer.h"

#include <utility>
#include <variant>

#include "io/loop.h"

namespace moolink::runtime {

group::Down group_down(rpc::Down how) {
  switch (how) {
    case rpc::Down::dead:
      return group::Down::dead;
    case rpc::Down::closed:
      return group::Down::closed;
    case rpc::Down::unreachable:
      break;
  }
  return group::Down::unreachable;
}

BrokerPeer::BrokerPeer(std::shared_ptr<RpcPeer> rpc, group::BrokerConfig config)
    : rpc_(std::move(rpc)), broker_(config, entropy64(), io::now()) {
  const Engine::Lock lock = rpc_->context()->lock();
  rpc_->router().add(rpc::Service::group, ServiceRouter::kBroker, ServiceRouter::kAnyGroup,
                     [this](const Uid& from, const wire::Payload& payload) {
                       broker_.received(io::now(), from, payload.body.span());
                       carry_out();
                     });
  rpc_->add(static_cast<PeerObserver&>(*this));
  rpc_->context()->engine().add(*this);
}

BrokerPeer::~BrokerPeer() { close(); }

void BrokerPeer::close() {
  if (rpc_->context()->abandoned()) return;
  const Engine::Lock lock = rpc_->context()->lock();
  if (std::exchange(closed_, true)) return;
  rpc_->router().remove(rpc::Service::group, ServiceRouter::kBroker);
  rpc_->remove(static_cast<PeerObserver&>(*this));
  rpc_->context()->engine().remove(*this);
}

bool BrokerPeer::closed() {
  const Engine::Lock lock = rpc_->context()->lock();
  return closed_;
}

std::vector<std::string> BrokerPeer::groups() {
  const Engine::Lock lock = rpc_->context()->lock();
  return broker_.groups();
}

group::View BrokerPeer::view(const std::string& group) {
  const Engine::Lock lock = rpc_->context()->lock();
  const group::View* view = broker_.view(group);
  return view == nullptr ? group::View{} : *view;
}

void BrokerPeer::tick(Time now) {
  broker_.tick(now);
  carry_out();
}

void BrokerPeer::describe(Time, Describe how, std::string& text) const {
  if (how != Describe::everything) return;
  text += "broker '" + rpc_->name_locked() + "'\n";
  for (const std::string& group : broker_.groups()) {
    const group::View* view = broker_.view(group);
    text += "  group '" + group + "': ";
    text += (view == nullptr || view->empty() ? "no view yet" : group::describe(*view)) + "\n";
  }
}

void BrokerPeer::peer_up(const rpc::PeerUp& /*peer*/) {}  // members announce themselves

void BrokerPeer::peer_down(const rpc::PeerDown& peer) {
  broker_.peer_down(io::now(), peer.instance, group_down(peer.how));
  carry_out();
}

void BrokerPeer::carry_out() {
  for (group::Broker::Action& action : broker_.drain()) {
    if (auto* send = std::get_if<group::Broker::Send>(&action)) {
      rpc_->router().send(send->instance, send->name, rpc::Service::group, {send->bytes, {}},
                          send->group);
    } else if (auto* log = std::get_if<group::Broker::Log>(&action)) {
      rpc_->context()->log(log->level, std::move(log->text));
    }
  }
}

}  // namespace moolink::runtime
