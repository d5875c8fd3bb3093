#include "runtime/peer/peer_transports.h"

#include <algorithm>
#include <utility>

#include "base/barrier.h"
#include "base/environment_variable.h"
#include "transport/transports.h"

namespace moolink::runtime {

PeerTransports::PeerTransports(std::shared_ptr<Context> context, const RpcOptions& options,
                               transport::Handler& handler, rpc::Node& node)
    : context_(std::move(context)),
      node_(node),
      chosen_(options.transports),
      environment_{context_->engine().loop(),
                   context_->pool(),
                   handler,
                   options.limits,
                   context_->host_key(),
                   environment_variable("MOOLINK_INTERFACE")} {
  environment_.lending = &context_->lending();
  environment_.keyring = options.keyring;
  environment_.name = node.name();
  environment_.tls_thread = switch_variable("MOOLINK_TLS_THREAD");
  environment_.streams.most =
      static_cast<std::size_t>(number_variable("MOOLINK_TCP_STREAMS", 4, 0, 16));
}

void PeerTransports::choose(const std::vector<wire::PathKind>& kinds) {
  if (started_) {
    throw Exception(ErrorCode::invalid_argument,
                    "transports are chosen before the first listen or connect");
  }
  chosen_ = kinds;
  node_.set_paths(kinds);
}

void PeerTransports::start() {
  if (started_) return;
  auto [made, kinds, lacking, warning] = transport::make_transports(environment_, chosen_);
  if (!warning.empty()) context_->log(LogLevel::warning, std::move(warning));
  transports_ = std::move(made);
  node_.set_paths(kinds, std::move(lacking));
  started_ = true;
  if (std::ranges::count(kinds, wire::PathKind::shm) != 0) listen_unasked("shm://");
}

transport::Transport& PeerTransports::serving(const std::string& address) {
  for (const auto& transport : transports_) {
    if (transport->accepts(address)) return *transport;
  }
  throw Exception(ErrorCode::invalid_argument,
                  "no enabled transport serves the address '" + address + "'");
}

std::vector<std::string> PeerTransports::listen(const std::vector<std::string>& addresses,
                                                const std::string& advertise) {
  transport::Transport& transport = serving(addresses.front());
  // Refuses before it binds anything.
  if (!advertise.empty()) transport.announced(advertise, {"tcp://*:1"});
  std::vector<std::string> bound;
  Error failed;
  for (const std::string& address : addresses) {
    // Of another family it would get another port.
    if (!bound.empty() && address.ends_with(":0")) break;
    guard(
        [&]() MOOLINK_LOCKED {
          for (std::string& one : transport.listen(address)) bound.push_back(std::move(one));
        },
        [&](const Error& error) { failed = error; });
  }
  if (bound.empty()) throw Exception(failed);
  std::vector<std::string> announced =
      advertise.empty() ? bound : transport.announced(advertise, bound);
  listens_.insert(transport.kind());
  node_.listening(announced);
  listen_on_companions(bound);
  return announced;
}

void PeerTransports::listen_unasked(const std::string& address) {
  guard([&]() MOOLINK_LOCKED { listen({address}, {}); },
        [this](const Error& error) MOOLINK_LOCKED {
          context_->log(LogLevel::warning, "others cannot dial this peer: " + error.message);
        });
}

// Starts the listeners that other transports need beside one that is bound to these addresses.
void PeerTransports::listen_on_companions(const std::vector<std::string>& bound) {
  for (const auto& transport : transports_) {
    const std::string address = transport->beside(bound);
    if (!address.empty() && !listens_.contains(transport->kind())) listen_unasked(address);
  }
}

void PeerTransports::listen_beside(const transport::Connection& connection) {
  std::string address = connection.local_address();
  // Others must use the chosen interfaces, whichever this connection used.
  if (!address.empty() && !environment_.interface.empty()) {
    address = std::string(wire::kPathNames[connection.path()]) + "://*:0";
  }
  if (!address.empty() && !listens_.contains(connection.path())) listen_unasked(address);
}

void PeerTransports::cannot_accept(Time now, const Error& error) {
  // The listener tries again several times a second while a connection waits.
  not_accepted_ = error.message;
  not_accepted_until_ = now + seconds(1);
}

std::vector<std::unique_ptr<transport::Transport>> PeerTransports::stop() {
  for (const auto& transport : transports_) transport->stop();
  return std::exchange(transports_, {});
}

void PeerTransports::abandon() noexcept {
  for (const auto& transport : transports_) transport->abandon();
}

}  // namespace moolink::runtime
