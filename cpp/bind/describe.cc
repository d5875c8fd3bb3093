#include "bind/describe.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "bind/errors.h"

namespace moolink::bind {
namespace {

std::string paths_text(const rpc::PeerInfo& info) {
  return info.paths.empty() ? "none" : std::string(wire::kPathNames[info.paths.front()]);
}

nb::str name_of(wire::PathKind path) { return nb::str(wire::kPathNames[path]); }

nb::list path_names(const rpc::PeerInfo& info) {
  nb::list names;
  for (const wire::PathKind path : info.paths) names.append(name_of(path));
  return names;
}

// None: not measured.
nb::object seconds_or_none(Duration duration) {
  if (duration < Duration(0)) return nb::none();
  return nb::float_(in_seconds_of(duration));
}

nb::dict describe(const rpc::PeerInfo& info) {
  nb::dict result;
  result["name"] = info.name;
  result["group"] = info.scope;
  result["instance"] = info.instance.hex();
  result["same_host"] = info.same_host;
  result["connected"] = info.connected;
  result["suspected"] = info.suspected;
  result["path"] = paths_text(info);
  result["paths"] = path_names(info);
  result["latency"] = seconds_or_none(info.round_trip);
  result["last_latency"] = seconds_or_none(info.last_round_trip);
  result["silent"] = in_seconds_of(info.silent);
  result["addresses"] = info.addresses;
  result["unacknowledged_bytes"] = info.unacknowledged_bytes;
  result["loans_given"] = info.loans_given;
  result["loans_held"] = info.loans_held;
  result["calls_waiting"] = info.calls_waiting;
  result["calls_running"] = info.calls_running;
  return result;
}

nb::dict describe(const rpc::PathState& path) {
  nb::dict result;
  result["path"] = name_of(path.kind);
  result["state"] = path.in_use ? "in use" : path.live ? "ready" : "unused";
  result["reason"] = text(path.reason);
  result["address"] = text(path.address);
  result["cipher"] = text_or_none(path.cipher);
  result["latency"] = seconds_or_none(path.round_trip);
  result["last_latency"] = seconds_or_none(path.last_round_trip);
  result["silent"] = path.live ? nb::object(nb::float_(in_seconds_of(path.silent))) : nb::none();
  return result;
}

nb::dict describe(const rpc::Tried::value_type& tried) {
  const auto& [address, failures] = tried;
  nb::dict result;
  result["address"] = text(address);
  result["tries"] = failures.tries;
  result["given_up"] = failures.given_up;
  result["error"] = text(failures.error);
  return result;
}

template <class Items>
nb::list describe_all(const Items& items) {
  nb::list list;
  for (const auto& item : items) list.append(describe(item));
  return list;
}

nb::dict describe(const runtime::PathStats& stats) {
  nb::dict result;
  result["frames_written"] = stats.frames_written;
  result["frames_received"] = stats.frames_received;
  result["bytes_written"] = stats.bytes_written;
  result["bytes_received"] = stats.bytes_received;
  return result;
}

}  // namespace

std::string places_text(const std::vector<std::string>& addresses) {
  std::string network;
  std::string all;
  for (const std::string& address : addresses) {
    for (std::string* text : {&network, &all}) {
      if (text == &network && address.starts_with("shm:")) continue;
      *text += (text->empty() ? " at " : ", ") + address;
    }
  }
  return network.empty() ? all : network;
}

double in_seconds_of(Duration duration) { return std::chrono::duration<double>(duration).count(); }

nb::dict describe(const runtime::AccumulatorPeer::Phases& phases) {
  nb::dict result;
  result["gather"] = seconds_or_none(phases.gather);
  result["reduce"] = in_seconds_of(phases.reduce);
  result["deliver"] = in_seconds_of(phases.deliver);
  return result;
}

nb::dict describe(const runtime::RpcStats& stats) {
  runtime::PathStats all;
  nb::dict paths;
  for (std::size_t kind = 0; kind < stats.paths.size(); ++kind) {
    const runtime::PathStats& path = stats.paths[kind];
    all.frames_written += path.frames_written;
    all.frames_received += path.frames_received;
    all.bytes_written += path.bytes_written;
    all.bytes_received += path.bytes_received;
    if (path.frames_written + path.frames_received == 0) continue;
    paths[name_of(static_cast<wire::PathKind>(kind))] = describe(path);
  }
  nb::dict result = describe(all);
  result["calls_sent"] = stats.calls_sent;
  result["calls_succeeded"] = stats.calls_succeeded;
  result["calls_failed"] = stats.calls_failed;
  result["calls_pending"] = stats.calls_pending;
  result["calls_received"] = stats.calls_received;
  result["calls_running"] = stats.calls_running;
  result["paths"] = paths;
  result["connections"] = stats.connections;
  result["connections_opened"] = stats.connections_opened;
  result["dials_failed"] = stats.dials_failed;
  result["peers"] = stats.peers;
  result["peers_lost"] = stats.peers_lost;
  return result;
}

nb::list describe(const std::vector<rpc::PeerInfo>& peers) { return describe_all(peers); }

nb::dict describe(const rpc::Explanation& known) {
  nb::dict result;
  result["name"] = text(known.name);
  result["instance"] = known.instance ? nb::object(text(known.instance.hex())) : nb::none();
  result["connected"] = known.connected;
  result["suspected"] = known.suspected;
  result["same_host"] = known.same_host;
  result["reason"] = text(known.reason);
  const auto used = std::ranges::find_if(known.paths, &rpc::PathState::in_use);
  const rpc::PathState path = used == known.paths.end() ? rpc::PathState{} : *used;
  result["path"] = path.in_use ? name_of(path.kind) : nb::str("none");
  result["cipher"] = text_or_none(path.cipher);
  result["latency"] = seconds_or_none(path.round_trip);
  result["last_latency"] = seconds_or_none(path.last_round_trip);
  result["paths"] = describe_all(known.paths);
  result["addresses"] = known.addresses;
  result["tried"] = describe_all(known.tried);
  result["asked"] = known.asked;
  return result;
}

}  // namespace moolink::bind
