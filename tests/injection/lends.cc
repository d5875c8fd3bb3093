// Lent memory returns to its owner, whatever fails at either side.

#include <cstring>
#include <utility>

#include "runtime/peer/loans.h"
#include "scenario.h"
#include "scenarios.h"

namespace moolink::injection {
namespace {

using runtime::Future;
using runtime::Incoming;

constexpr Duration kTimeout = seconds(4);
constexpr std::size_t kBytes = 200'000;

struct Held {
  MutableBuffer block;
  std::shared_ptr<const void> release;
};

// A payload whose one part is lent; `released` is done when its last reader is gone.
wire::Payload lent_payload(Process& owner, const std::shared_ptr<Future>& released) {
  auto held = std::make_shared<Held>();
  faults::inside([&] {
    held->block = owner.context->lending().allocate(kBytes);
    held->release = runtime::on_release(owner.context, released, {});
  });
  std::memset(held->block.data(), 7, kBytes);
  const auto place = owner.context->lending().find(held->block.data(), kBytes);
  wire::Payload payload = payload_of(1, 0);
  const std::byte* data = held->block.data();
  payload.parts = {Buffer(std::shared_ptr<const void>(std::move(held), data), data, kBytes)};
  payload.lent = {{0, place->segment, place->offset}};
  return payload;
}

void lend(Report& report, Process& client) {
  const auto released = std::make_shared<Future>(client.context);
  try {
    wire::Payload payload = lent_payload(client, released);
    const auto call = faults::inside(
        [&] { return client.peer->call("server", "read", std::move(payload), kTimeout, 1); });
    faults::inside([&] { call->wait(io::now() + 2 * kTimeout, {}); });
    if (!call->done()) return report.complain("a call with lent memory did not end");
    if (const auto* error = std::get_if<Error>(&call->outcome())) {
      check_error(report, "a call with lent memory", *error);
    }
    if (!faults::inside([&] { return released->wait(io::now() + 2 * kTimeout, {}); })) {
      report.complain("lent memory was not released");
    }
  } catch (const std::exception& e) {
    check_error(report, "a call with lent memory", make_error(ErrorCode::error, e.what()));
  }
}

}  // namespace

void lends_over_shm(Report& report) {
  const std::vector paths{wire::PathKind::shm, wire::PathKind::tcp};
  Process server(report, "server", paths);
  Process client(report, "client", paths);
  if (!server.peer || !client.peer) return;
  std::string address;
  if (!attempt(report, "define()",
               [&] {
                 server.peer->undefine("read", {});
                 server.peer->define("read",
                                     [](const Incoming& call) { call.responder->send({}); });
               }) ||
      !attempt(report, "listen()", [&] { address = server.peer->listen("127.0.0.1:0").at(0); }) ||
      !attempt(report, "connect()", [&] { client.peer->connect(address); })) {
    return;
  }
  for (int i = 0; i < 4 && report.complaints().empty(); ++i) lend(report, client);
}

}  // namespace moolink::injection
