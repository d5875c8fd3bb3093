// Calls between two processes: small ones, ones of 64 KB and 4 MB, a stream, a cancelled one.

#include "scenario.h"
#include "scenarios.h"

namespace moolink::injection {
namespace {

using runtime::Future;
using runtime::Incoming;

constexpr Duration kTimeout = seconds(4);
constexpr std::size_t kSizes[] = {0, 64 << 10, 300 << 10, 4 << 20};
constexpr std::uint64_t kItems = 3;

void define_handlers(runtime::RpcPeer& server) {
  server.define("echo", [](const Incoming& call) { call.responder->send(call.arguments); });
  server.define("count", [](const Incoming& call) {
    for (std::uint64_t i = 0; i < kItems; ++i) {
      wire::Payload item;
      {
        const faults::Shield shield;
        item = payload_of(i, 0);
      }
      call.responder->send_item(std::move(item));
    }
    call.responder->send(call.arguments);
  });
}

// One call; true if it was answered.
bool call(Report& report, runtime::RpcPeer& client, std::uint64_t number, std::size_t bytes) {
  const std::string what = "a call of " + std::to_string(bytes) + " bytes";
  std::shared_ptr<Future> future;
  bool ended = false;
  wire::Payload payload = payload_of(number, bytes);
  try {
    faults::inside([&] {
      future = client.call("server", "echo", std::move(payload), kTimeout, 1);
      ended = future->wait(io::now() + 2 * kTimeout, {});
    });
  } catch (const std::exception& e) {
    check_error(report, what.c_str(), make_error(ErrorCode::error, e.what()));
    return false;
  }
  if (!ended) {
    report.complain(what + " did not end");
  } else if (const auto* error = std::get_if<Error>(&future->outcome())) {
    check_error(report, what.c_str(), *error);
  } else if (!is_payload_of(std::get<wire::Payload>(future->outcome()), number, bytes)) {
    report.complain(what + " was answered with something else");
  } else {
    return true;
  }
  return false;
}

void stream(Report& report, runtime::RpcPeer& client) {
  std::uint64_t items = 0;
  try {
    wire::Payload payload = payload_of(7, 0);
    faults::inside([&] {
      const auto stream = client.stream("server", "count", std::move(payload), kTimeout, 1, kItems);
      while (!stream->ended()) {
        if (!stream->wait(io::now() + 2 * kTimeout, {})) {
          const faults::Shield shield;
          return report.complain("a stream did not end");
        }
        if (auto item = stream->take()) {
          const faults::Shield shield;
          if (!is_payload_of(*item, items++, 0)) report.complain("an item of a stream is wrong");
        }
      }
      const faults::Shield shield;
      if (const auto* error = std::get_if<Error>(&stream->outcome())) {
        check_error(report, "a stream", *error);
      } else if (items != kItems) {
        report.complain("a stream ended well with " + std::to_string(items) + " items");
      }
    });
  } catch (const std::exception& e) {
    check_error(report, "a stream", make_error(ErrorCode::error, e.what()));
  }
}

void run(Report& report, const std::vector<wire::PathKind>& paths) {
  Process server(report, "server", paths);
  Process client(report, "client", paths);
  if (!server.peer || !client.peer) return;
  std::string address;
  if (!attempt(report, "define()", [&] {
        server.peer->undefine("echo", {});
        server.peer->undefine("count", {});
        define_handlers(*server.peer);
      })) {
    return;
  }
  if (!attempt(report, "listen()", [&] { address = server.peer->listen("127.0.0.1:0").at(0); }) ||
      !attempt(report, "connect()", [&] { client.peer->connect(address); })) {
    return;
  }
  std::uint64_t number = 0;
  for (const std::size_t bytes : kSizes) {
    call(report, *client.peer, ++number, bytes);
    if (!report.complaints().empty()) return;
  }
  stream(report, *client.peer);
  if (!report.complaints().empty()) return;
  attempt(report, "cancel()",
          [&] { client.peer->call("nobody", "echo", {}, kTimeout, 1)->cancel(); });
  for (const std::size_t bytes : kSizes) {
    // A call may be sent in the session that the fault ends, before that is known here.
    const bool fired = faults::fired();
    if (call(report, *client.peer, ++number, bytes) || !fired) continue;
    if (call(report, *client.peer, ++number, bytes)) continue;
    return report.complain("a call after the fault failed");
  }
}

}  // namespace

void calls_over_tcp(Report& report) { run(report, {wire::PathKind::tcp}); }
void calls_over_shm(Report& report) { run(report, {wire::PathKind::shm, wire::PathKind::tcp}); }

}  // namespace moolink::injection
