#include "runtime/peer/responder.h"

#include <utility>

#include "base/barrier.h"

namespace moolink::runtime {

bool Responder::send(rpc::Reply reply) {
  if (sent_.exchange(true)) return false;
  Tasks forgotten;  // destroyed without the lock
  const Engine::Lock lock = peer_->context()->lock();
  forgotten.swap(on_cancel_);
  peer_->reply(key_, std::move(reply));
  return true;
}

void Responder::on_cancel(Task task) {
  const Engine::Lock lock = peer_->context()->lock();
  if (sent_) return;
  on_cancel_.push_back(std::move(task));
  if (cancelled_) cancel();
}

void Responder::send_item(wire::Payload item) {
  peer_->send_item(key_, std::move(item));
  ++items_;
}

void Responder::when_room(Task task) {
  const Engine::Lock lock = peer_->context()->lock();
  resume_.clear();
  resume_.push_back(std::move(task));
  if (has_room() || cancelled_) resume();
}

void Responder::raise_credit(std::uint64_t allowed) {
  allowed_ = allowed;
  resume();
}

void Responder::cancel() {
  cancelled_ = true;
  (void)take_arguments();
  resume();
  peer_->context()->workers().submit(std::move(on_cancel_));
}

void Responder::resume() { peer_->context()->workers().submit(std::move(resume_)); }

Responder::~Responder() {
  if (sent_ || peer_->closed() || peer_->context()->abandoned()) return;
  // Through the loop, because the last reference may go while the engine's lock is held.
  const auto post = [this] {
    peer_->context()->engine().loop().post([peer = peer_, key = key_, function = function_]()
                                               MOOLINK_LOCKED { peer->dropped(key, function); });
  };
  // If the allocation fails, the caller waits until its time-out.
  guard(post, [](const Error&) {});
}

}  // namespace moolink::runtime
