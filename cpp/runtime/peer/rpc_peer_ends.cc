// The ends of actions of the Node that failed, and of the peer.

#include <algorithm>
#include <optional>
#include <utility>

#include "base/barrier.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {
namespace {

constexpr Duration kFinishHandlers = milliseconds(500);
constexpr Duration kDeliver = seconds(1);
constexpr Duration kCloseMargin = milliseconds(500);

}  // namespace

// --- of actions that failed

void RpcPeer::end(const rpc::RunHandler& action, const Error& error) {
  node_.reply(io::now(), action.key,
              Error{.code = ErrorCode::error,
                    .message = "peer '" + node_.name() + "' cannot run the call: " + error.message,
                    .peer = node_.name()});
}

void RpcPeer::end(const rpc::StreamItem& action, const Error& error) {
  const auto pending = pending_.extract(action.id);
  if (!pending.empty()) pending.mapped().outcome->complete(error);
  node_.cancel(io::now(), action.id);
}

// The peer has reported something impossible about its memory.
void RpcPeer::refuse_path(wire::ConnectionId id, const Error& error) {
  const auto connection = forget(id, node_.instance_of(id));
  node_.closed(io::now(), id, error);
  if (connection != nullptr) connection->close();
}

// --- of the peer

// Each step behind the barrier: whatever fails, the peer is closed when this returns.
void RpcPeer::close() {
  if (context_->abandoned() || closing_.exchange(true)) return;
  const auto ignore = [](const Error&) {};
  std::vector<std::unique_ptr<transport::Transport>> transports;  // destroyed without the lock
  Engine::Lock lock = context_->lock();
  idle_at_ = runs_handler_here() ? 1 : 0;
  if (stats_.calls_running > idle_at_) {
    await(lock, idle_, "close(): handlers that run", kFinishHandlers, [] {});
  }
  guard(
      [&]() MOOLINK_LOCKED {
        wait_until_delivered(lock, [this]() MOOLINK_LOCKED {
          return std::ranges::all_of(observers_, &PeerObserver::has_delivered);
        });
      },
      ignore);
  for (std::size_t i = observers_.size(); i-- > 0;) {  // they may remove themselves
    guard([&]() MOOLINK_LOCKED { observers_[i]->closing(); }, ignore);
  }
  await(lock, node_closed_, "close(): replies to be sent",
        rpc::Config{}.close_within + kCloseMargin, [&]() MOOLINK_LOCKED {
          node_.close(io::now());
          operation_done();
        });
  finished_ = true;
  for (const auto& transport : transports_) transport->stop();
  transports.swap(transports_);
  connections_.clear();
  dirty_.clear();
  driven_.reset();
  forks_.reset();
  fail_pending();
  functions_.clear();
  observers_.clear();
}

// Runs `begin`, which leads to finish(`waiter`), and waits for that, unless one of them fails.
template <class Begin>
void RpcPeer::await(Engine::Lock& lock, Waiter*& waiter, const char* what, Duration within,
                    const Begin& begin) {
  std::optional<Waiter> waits;
  const auto wait = [&]() MOOLINK_LOCKED {
    waits.emplace();
    waits->what = what;
    waiter = &*waits;
    begin();
    context_->wait(lock, *waits, io::now() + within, {});
  };
  guard(wait, [](const Error&) {});
  waiter = nullptr;
}

void RpcPeer::fail_pending() {
  const auto fail = [this](Awaitable& awaited) {
    const auto say = [&]() MOOLINK_LOCKED {
      awaited.complete(Error{.code = ErrorCode::closed,
                             .message = "the peer '" + node_.name() + "' was closed",
                             .peer = node_.name(),
                             .ran = Ran::maybe});
    };
    guard(say, [&](const Error& error) MOOLINK_LOCKED {
      awaited.complete(make_error(ErrorCode::closed, error.message));
    });
  };
  for (auto& [id, pending] : std::exchange(pending_, {})) fail(*pending.outcome);
  for (auto& [key, running] : std::exchange(running_, {})) {
    if (const auto responder = running.responder.lock()) responder->cancel();
    // A worker finds that the call has ended, and counts its handler as done.
    context_->workers().submit(std::move(running.held));
  }
}

void RpcPeer::wait_until_delivered(Engine::Lock& lock, const std::function<bool()>& delivered) {
  const Time deadline = io::now() + kDeliver;
  for (Time now = io::now(); now < deadline && !delivered(); now = io::now()) {
    Waiter moment;  // no event tells when the last peer has taken the data in a shared segment
    moment.what = "close(): data on its way to other members";
    context_->wait(lock, moment, now + milliseconds(1), {});
  }
}

}  // namespace moolink::runtime
