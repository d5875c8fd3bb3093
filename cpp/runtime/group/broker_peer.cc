#include "runtime/group/broker_peer.h"

#include <utility>

#include "io/loop.h"

namespace moolink::runtime {

BrokerPeer::BrokerPeer(std::shared_ptr<RpcPeer> rpc, group::BrokerConfig config)
    : BrokerPeer(rpc->context()->lock(), rpc, config) {}

BrokerPeer::BrokerPeer(const Engine::Lock& /*held*/, std::shared_ptr<RpcPeer> rpc,
                       group::BrokerConfig config)
    : rpc_(std::move(rpc)),
      broker_(config, entropy64(), io::now()),
      routed_(rpc_->router().route(
          rpc::Service::group, ServiceRouter::kBroker, ServiceRouter::kAnyGroup,
          [this](const Uid& from, const wire::Payload& payload) MOOLINK_LOCKED {
            broker_.received(io::now(), from, payload.body.span());
            carry_out();
          })),
      observes_(rpc_->add(*this)),
      driven_(rpc_->context()->engine().add(*this)) {}

BrokerPeer::~BrokerPeer() { close(); }

void BrokerPeer::close() {
  if (rpc_->context()->abandoned()) return;
  const Engine::Lock lock = rpc_->context()->lock();
  routed_.reset();
  observes_.reset();
  driven_.reset();
}

bool BrokerPeer::closed() {
  const Engine::Lock lock = rpc_->context()->lock();
  return routed_ == nullptr;
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
  text += "broker '" + rpc_->node().name() + "'\n";
  for (const std::string& group : broker_.groups()) {
    const group::View* view = broker_.view(group);
    text += "  group '" + group + "': ";
    text += (view == nullptr || view->empty() ? "no view yet" : group::describe(*view)) + "\n";
  }
}

void BrokerPeer::peer_down(const rpc::PeerDown& peer) {
  broker_.peer_down(io::now(), peer.instance, peer.how);
  carry_out();
}

void BrokerPeer::carry_out() {
  rpc_->context()->engine().rearm(broker_.next_deadline());
  pump_.run([this]() MOOLINK_LOCKED { return broker_.drain(); },
            [this](auto& action) MOOLINK_LOCKED { perform(action); },
            [this](auto&, const Error& error) MOOLINK_LOCKED {
              // Members announce themselves again and again, and get an answer each time.
              rpc_->context()->log(LogLevel::error,
                                   "the broker went on after an error: " + error.message);
            });
}

void BrokerPeer::perform(group::Broker::Send& action) {
  rpc_->send_service_to(action.instance, action.name, rpc::Service::group, {action.bytes, {}},
                        action.group);
}

}  // namespace moolink::runtime
