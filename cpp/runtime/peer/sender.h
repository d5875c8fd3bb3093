#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "base/buffer.h"
#include "base/thread_safety.h"
#include "rpc/node.h"
#include "runtime/engine/context.h"
#include "wire/payload.h"

namespace moolink::runtime {

// Memory of the receiver of a message: the message's bytes are captured straight into it. An unused
// grant is returned with the last copy of the buffer.
struct PlacedMemory {
  MutableBuffer memory;
  std::shared_ptr<wire::StandingGrant> standing;
};

// The interface of a peer for the encoders of its messages and the reply paths of its calls.
class Sender {
 public:
  virtual ~Sender() = default;
  virtual const std::shared_ptr<Context>& context() const = 0;
  virtual bool closed() const = 0;

  // Memory of the message's receiver for a part of that many bytes; nullopt: none, and the part
  // travels like any other.
  virtual std::optional<PlacedMemory> place(const rpc::Receiver& receiver, std::size_t bytes)
      MOOLINK_UNLOCKED = 0;
  // Whether parts may stay in this CUDA device's memory (device::allocate), where the path to the
  // receiver reads them. If that path is lost, they are copied to the host.
  virtual bool reads_device(const rpc::Receiver& receiver, int device) MOOLINK_UNLOCKED = 0;

  // The result of a call with a handler here; its items before that, if it is streamed.
  virtual void reply(const rpc::CallKey& key, rpc::Reply reply) MOOLINK_LOCKED = 0;
  virtual void send_item(const rpc::CallKey& key, wire::Payload item) MOOLINK_UNLOCKED = 0;
  // The handler of `function` has dropped the call without a reply.
  virtual void dropped(const rpc::CallKey& key, const std::string& function) MOOLINK_LOCKED = 0;
};

// The only receiver of a message; the message's encoder passes it to the sender.
struct Recipient {
  Sender& sender;
  rpc::Receiver receiver;
};

}  // namespace moolink::runtime
