#include "transport/verbs/transport.h"

#include <algorithm>
#include <utility>

#include "transport/verbs/address.h"
#include "transport/verbs/choice.h"

namespace moolink::transport::verbs {
namespace {

Environment environment_of_control(const Environment& of, Handler& handler) {
  return {of.loop, of.allocator, handler, of.limits, of.host_key, of.interface};
}

bool is_loopback(const std::string& address) {
  return address.starts_with("verbs://127.") || address.starts_with("verbs://[::1]");
}

}  // namespace

VerbsTransport::VerbsTransport(Environment& environment, const Library& library, const Port& port)
    : environment_(environment),
      library_(library),
      port_(port),
      of_control_(environment_of_control(environment, *this)),
      control_((refresh(), of_control_)) {
  device();
}

VerbsTransport::~VerbsTransport() { stop(); }

// Settings that may have changed since.
void VerbsTransport::refresh() {
  of_control_.limits = environment_.limits;
  of_control_.max_unauthenticated = environment_.max_unauthenticated;
  of_control_.handshake_timeout = environment_.handshake_timeout;
  of_control_.keyring = environment_.keyring;
  of_control_.name = environment_.name;
}

// --- addresses

bool VerbsTransport::accepts(const std::string& address) const { return is_verbs_address(address); }

void VerbsTransport::check(const std::string& address) const { control_.check(to_tcp(address)); }

std::vector<std::string> VerbsTransport::listen(const std::string& address) {
  refresh();
  std::vector<std::string> addresses;
  for (const std::string& bound : control_.listen(to_tcp(address))) {
    addresses.push_back(from_tcp(bound));
  }
  // Others are on other hosts; loopback is announced only if it was requested.
  const bool all_loopback = std::all_of(addresses.begin(), addresses.end(), is_loopback);
  if (!all_loopback) std::erase_if(addresses, is_loopback);
  return addresses;
}

std::vector<std::string> VerbsTransport::announced(const std::string& advertise,
                                                   const std::vector<std::string>& bound) const {
  std::vector<std::string> listeners;
  for (const std::string& address : bound) listeners.push_back(to_tcp(address));
  std::vector<std::string> addresses;
  for (const std::string& told : control_.announced(advertise, listeners)) {
    addresses.push_back(from_tcp(told));
  }
  return addresses;
}

// The hosts where others reach the peer by tcp, with any port.
std::string VerbsTransport::beside(const std::vector<std::string>& bound) const {
  std::vector<std::string> reached;
  for (const std::string& address : bound) {
    const std::string same_host_and_port = from_tcp(address);
    if (tcp::is_tcp_address(address) && !is_loopback(same_host_and_port)) {
      reached.push_back(same_host_and_port);
    }
  }
  if (reached.empty()) return {};
  if (reached.size() > 1) return std::string(kScheme) + "*:0";
  return reached.front().substr(0, reached.front().rfind(':')) + ":0";
}

void VerbsTransport::dial(const std::string& address) {
  refresh();
  control_.dial(to_tcp(address));
}

// --- the device

// The open device, or a new one after a failure.
std::shared_ptr<Device> VerbsTransport::device() {
  if (!port_down_.empty()) throw Exception(ErrorCode::error, port_down_);
  if (device_ == nullptr || device_->failed()) {
    unwatch_device();
    device_ = std::make_shared<Device>(library_, port_);
    watch_device();
  }
  return device_;
}

void VerbsTransport::watch_device() {
  completions_watch_ =
      environment_.loop.watch(device_->channel()->fd, EPOLLIN,
                              [this](std::uint32_t) MOOLINK_LOCKED { completions_ready(); });
  events_watch_ =
      environment_.loop.watch(device_->context()->async_fd, EPOLLIN,
                              [this](std::uint32_t) MOOLINK_LOCKED { look_at_events(); });
}

void VerbsTransport::unwatch_device() {
  completions_watch_.reset();
  events_watch_.reset();
}

// Nothing is taken here: the loop looks at every connection after each wait.
void VerbsTransport::completions_ready() {
  ibv_cq* queue = nullptr;
  void* of = nullptr;
  while (library_.get_cq_event(device_->channel(), &queue, &of) == 0) {
    library_.ack_cq_events(queue, 1);
    static_cast<VerbsConnection*>(of)->rung();
  }
}

void VerbsTransport::look_at_events() {
  const std::shared_ptr<Device> device = device_;  // an event may end its use here
  auto event = zeroed<ibv_async_event>();
  while (library_.get_async_event(device->context(), &event) == 0) {
    take_event(event);
    library_.ack_async_event(&event);
  }
  if (device_ == nullptr || !device_->failed()) return;
  unwatch_device();
  device_.reset();  // its connections close it with their end; the next one opens it anew
}

void VerbsTransport::take_event(const ibv_async_event& event) {
  const std::string words = port_.device + ": " + library_.event_type_str(event.event_type);
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
      for (const auto& [id, connection] : connections_) {
        if (connection->uses(event.element.qp)) {
          connection->fail(make_error(ErrorCode::peer_lost, words));
        }
      }
      return;
    case IBV_EVENT_PORT_ERR:
      if (event.element.port_num != port_.number) return;
      port_down_ = words;
      return fail_all(words);
    case IBV_EVENT_PORT_ACTIVE:
      if (event.element.port_num == port_.number) port_down_.clear();
      return;
    case IBV_EVENT_DEVICE_FATAL:
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_CQ_ERR:
      device_->set_failed();
      return fail_all(words);
    default:
      return;
  }
}

void VerbsTransport::fail_all(const std::string& why) {
  for (const auto& [id, connection] : connections_) {
    connection->fail(make_error(
        ErrorCode::peer_lost, "connection with " + connection->peer_address() + " closed: " + why));
  }
}

// --- control connections

void VerbsTransport::opened(std::shared_ptr<Connection> control, const std::string& dialled) {
  const std::string address = dialled.empty() ? std::string() : from_tcp(dialled);
  Connection& opened = *control;
  try {
    auto connection =
        std::make_shared<VerbsConnection>(environment_, *this, device(), control, address);
    connections_.emplace(opened.id(), connection);
    connection->start();
  } catch (const Exception& e) {
    // The other side gets the reason why there is no RDMA.
    opened.write(
        wire::make_frame(wire::FrameType::refuse,
                         wire::Refuse{e.error().code, e.error().message, environment_.name}));
    opened.close();
    if (address.empty()) return;
    environment_.loop.post([this, address, error = e.error(), alive = std::weak_ptr(alive_)]()
                               MOOLINK_LOCKED {
                                 if (!alive.expired())
                                   environment_.handler.dial_failed(address, error);
                               });
  }
}

void VerbsTransport::closed(Connection& control, const Error& error, bool) {
  const auto found = connections_.find(control.id());
  if (found == connections_.end()) return;
  const std::shared_ptr<VerbsConnection> keep = found->second;
  keep->control_ended(error);
}

void VerbsTransport::dial_failed(const std::string& address, const Error& error) {
  Error told = error;
  // It is dialled under another name.
  const std::size_t at = told.message.find(address);
  if (at != std::string::npos) told.message.replace(at, address.size(), from_tcp(address));
  environment_.handler.dial_failed(from_tcp(address), told);
}

void VerbsTransport::turned_away(const Error& error) { environment_.handler.turned_away(error); }

void VerbsTransport::cannot_accept(const Error& error) {
  environment_.handler.cannot_accept(error);
}

void VerbsTransport::received(Connection& control, wire::ReceivedFrame frame) {
  const auto found = connections_.find(control.id());
  if (found == connections_.end()) return;
  const std::shared_ptr<VerbsConnection> keep = found->second;
  keep->told(frame);
}

std::span<std::byte> VerbsTransport::chunk_target(Connection&, const wire::ChunkHead&) {
  throw Exception(ErrorCode::wire, "a chunk on a connection for queue pairs");
}

// --- connections

void VerbsTransport::ended(wire::ConnectionId id) {
  std::erase_if(connections_, [id](const auto& entry) { return entry.second->id() == id; });
}

// --- the end

void VerbsTransport::stop() {
  if (std::exchange(stopped_, true)) return;
  alive_.reset();
  for (const auto& [id, connection] : connections_) connection->drop();
  connections_.clear();
  control_.stop();
  unwatch_device();
  device_.reset();
}

void VerbsTransport::abandon() noexcept {
  control_.abandon();
  if (device_ != nullptr) device_->abandon();
}

std::unique_ptr<Transport> make_transport(Environment& environment) {
  const Availability& found = availability();
  if (!found.usable) throw Exception(ErrorCode::error, "no RDMA: " + found.reason);
  const Choice choice = choose(*load_library().functions, Preferences::from_environment());
  if (!choice.port) throw Exception(ErrorCode::error, "no RDMA: " + choice.reason);
  return std::make_unique<VerbsTransport>(environment, *load_library().functions, *choice.port);
}

}  // namespace moolink::transport::verbs
