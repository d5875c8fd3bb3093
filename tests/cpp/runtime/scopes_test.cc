// What a peer that holds the key of one group can bring about at one that holds the token.

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "check.h"
#include "group/messages.h"
#include "runtime/group/broker_peer.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {
namespace scopes_test {

std::shared_ptr<RpcPeer> make_peer(const std::shared_ptr<Context>& context, std::string name,
                                   crypto::Key key) {
  RpcOptions options;
  options.name = std::move(name);
  options.keyring = crypto::Keyring({std::move(key)});
  options.key_origin = "a test";
  return RpcPeer::create(context, std::move(options));
}

wire::Payload announcement(const RpcPeer& peer, const std::string& group) {
  group::Announce announce;
  announce.self.instance = peer.instance();
  announce.self.name = "client";
  return {wire::encode(group::Message{group, std::move(announce)}), {}};
}

TEST("a broker hears of a group from those only that have shown its key, or the token") {
  struct Observer : PeerObserver {
    std::atomic<bool> up{false};
    void peer_up(const rpc::PeerUp&) override { up = true; }
    void peer_down(const rpc::PeerDown&) override {}
  } observer;
  crypto::Key token;
  token.secret.fill(std::byte{1});
  const auto server_context = Context::create({});
  const auto client_context = Context::create({});
  const auto server = make_peer(server_context, "broker", token);
  group::BrokerConfig config;
  config.gather = Duration::zero();
  BrokerPeer broker(server, config);
  const auto client = make_peer(client_context, "client", token.of_group("a"));
  Listed<PeerObserver> observes;
  {
    const Engine::Lock lock = client_context->lock();
    observes = client->add(observer);
  }
  client->connect(server->listen("127.0.0.1:0").at(0));
  while (!observer.up) std::this_thread::yield();
  {
    // Straight to the instance, as a client would that does not keep to its own group. In order.
    const Engine::Lock lock = client_context->lock();
    for (const char* group : {"b", "a"}) {
      client->send_service_to(server->instance(), "broker", rpc::Service::group,
                              announcement(*client, group));
    }
    client->flush();
  }
  while (broker.groups().empty()) std::this_thread::yield();
  CHECK_EQ(broker.groups().size(), 1u);
  CHECK_EQ(broker.groups().front(), std::string("a"));
  {
    const Engine::Lock lock = client_context->lock();
    observes.reset();
  }
  client->close();
  broker.close();
  server->close();
  client_context->stop();
  server_context->stop();
}

}  // namespace scopes_test
}  // namespace moolink::runtime
