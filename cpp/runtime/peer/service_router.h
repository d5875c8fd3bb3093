#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/thread_safety.h"
#include "base/uid.h"
#include "rpc/node.h"
#include "runtime/engine/context.h"
#include "wire/payload.h"

namespace moolink::runtime {

// Several groups, accumulators and a broker may share one peer; the first field of each service
// message names the addressee.
class ServiceRouter {
 public:
  using Route = std::function<void(const Uid& from, const wire::Payload& payload)>;

  // The scope of the broker's share of service `group`; a group's share has the group's name.
  static const std::string kBroker;
  // For the broker's share: each message names its group.
  static const std::string kAnyGroup;

  // The node is that of the peer, and outlives the router.
  ServiceRouter(const rpc::Node& node, std::shared_ptr<Context> context)
      : node_(node), context_(std::move(context)) {}

  // Adds a route until the result is destroyed. It ignores peers whose key is that of another group
  // than `group`. Throws Exception{invalid_argument} if the scope is taken on this peer.
  [[nodiscard]] std::shared_ptr<void> route(rpc::Service service, const std::string& scope,
                                            const std::string& group, Route route) MOOLINK_LOCKED;

  void dispatch(rpc::Service service, const Uid& from, const std::string& from_name,
                const wire::Payload& payload) MOOLINK_LOCKED;

 private:
  struct Destination {
    std::string group;
    Route route;
  };

  const rpc::Node& node_;
  const std::shared_ptr<Context> context_;
  std::map<std::pair<rpc::Service, std::string>, Destination> routes_;
};

}  // namespace moolink::runtime
