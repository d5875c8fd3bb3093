#include "runtime/peer/service_router.h"

#include <utility>

#include "base/error.h"
#include "base/names.h"
#include "group/messages.h"
#include "wire/archive.h"

namespace moolink::runtime {
namespace {

// The scope, and the group if only the message names it.
std::pair<std::string, std::string> scope_of(rpc::Service service, const wire::Payload& payload) {
  switch (service) {
    case rpc::Service::group: {
      const group::Recipient recipient = group::recipient_of(payload.body.span());
      return {recipient.broker ? ServiceRouter::kBroker : recipient.group, recipient.group};
    }
    case rpc::Service::collective:
    case rpc::Service::accumulate:
    case rpc::Service::snapshot: {  // all begin with the scope
      wire::Reader reader(payload.body);
      return {std::string(reader.text()), {}};
    }
    case rpc::Service::directory:
    case rpc::Service::namesakes:
      break;
  }
  throw Exception(ErrorCode::wire, "a service message that no service handles");
}

}  // namespace

// No group can have this name: names are not empty and contain no control characters.
const std::string ServiceRouter::kBroker("\x01");
const std::string ServiceRouter::kAnyGroup("\x01");

std::shared_ptr<void> ServiceRouter::route(rpc::Service service, const std::string& scope,
                                           const std::string& group, Route route) {
  auto remove = [this, key = std::pair(service, scope)](void*) { routes_.erase(key); };
  if (!routes_.emplace(std::pair(service, scope), Destination{group, std::move(route)}).second) {
    throw Exception(ErrorCode::invalid_argument,
                    scope == kBroker ? "this Rpc already has a broker"
                                     : "this Rpc already has a group or accumulator called '" +
                                           joined_names_text(scope) + "'");
  }
  return {this, std::move(remove)};  // which also runs if there is no memory for the result
}

void ServiceRouter::dispatch(rpc::Service service, const Uid& from, const std::string& from_name,
                             const wire::Payload& payload) {
  try {
    const auto [scope, named] = scope_of(service, payload);
    const auto route = routes_.find({service, scope});
    // A message for a group or an accumulator that this process has closed, or not made yet: its
    // sender repeats important messages (FLUSH), or learns the new view.
    if (route == routes_.end()) return;
    const Destination& to = route->second;
    if (node_.may_concern(from, to.group == kAnyGroup ? named : to.group)) {
      to.route(from, payload);
    } else {
      context_->log(LogLevel::warning, "ignored a message of peer '" + from_name +
                                           "' for a group whose key it has not shown");
    }
  } catch (const Exception& e) {
    if (e.error().code == ErrorCode::error) throw;  // of the system, not of the sender
    context_->log(LogLevel::warning, "ignored a message of peer '" + from_name + "': " + e.what());
  }
}

}  // namespace moolink::runtime
