#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "base/time.h"
#include "rpc/node.h"
#include "wire/payload.h"

namespace moolink::runtime {

class RpcPeer;

// The way back of one call: the first reply is sent, from any thread. Dropped without one, it tells
// the caller so at once.
class Responder {
 public:
  Responder(std::shared_ptr<RpcPeer> peer, rpc::CallKey key, std::string function)
      : peer_(std::move(peer)), key_(key), function_(std::move(function)) {}
  ~Responder();
  Responder(const Responder&) = delete;
  Responder& operator=(const Responder&) = delete;

  // False if there was a reply already.
  bool send(rpc::Reply reply);
  bool sent() const { return sent_; }
  // The caller does not wait any more.
  bool cancelled() const { return cancelled_; }
  void cancel() { cancelled_ = true; }
  const std::string& function() const { return function_; }

 private:
  std::shared_ptr<RpcPeer> peer_;
  const rpc::CallKey key_;
  const std::string function_;
  std::atomic<bool> sent_{false};
  std::atomic<bool> cancelled_{false};
};

// A call to be run by a handler.
struct Incoming {
  std::shared_ptr<Responder> responder;
  std::string caller;  // its name
  wire::Payload arguments;
  Time deadline;  // kNever: none
};

// Runs on a worker.
using CallHandler = std::function<void(Incoming)>;

}  // namespace moolink::runtime
