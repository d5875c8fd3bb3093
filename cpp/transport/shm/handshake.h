#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/descriptor.h"
#include "base/error.h"
#include "io/descriptor_passing.h"
#include "io/loop.h"
#include "memory/segment.h"
#include "transport/transport.h"

namespace moolink::transport::shm {

// Two processes that can exchange bytes and notice each other's death.
struct Link {
  Descriptor socket;
  std::optional<Descriptor> pidfd;            // of the peer's process, where the kernel gives one
  std::shared_ptr<memory::Segment> incoming;  // made here
  std::shared_ptr<memory::Segment> outgoing;  // made by the peer
  Descriptor bell;                            // made here: the watched end
  Descriptor peer_bell;                       // made by the peer: the end to ring
  std::string peer_address;
};

// From a connected socket to a Link: both sides pass a ring and a doorbell, in one message each.
class Handshake : public std::enable_shared_from_this<Handshake> {
 public:
  // Called once, from the loop; forgets the handshake then.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void linked(Handshake& handshake, Link link) = 0;
    virtual void failed(Handshake& handshake, const Error& error) = 0;
  };

  // `address`: as dialled, or empty for an accepted socket.
  Handshake(Environment& environment, Owner& owner, std::string address);
  ~Handshake();

  void accept(Descriptor socket);
  void dial(const std::string& abstract_name);
  // The address cannot be dialled: reports the reason to the owner.
  void refuse(Error error) { fail(std::move(error)); }
  const std::string& dialled_address() const { return address_; }
  // Ends without reporting it.
  void drop();
  void abandon() noexcept {
    socket_.reset();
    if (pidfd_) pidfd_->reset();
    bell_.reset();
  }

 private:
  void connect();
  void begin();
  template <class Work>
  void guarded(Work&& work) noexcept;
  void greet();
  void pass_ring();
  void readable();
  void finish(io::DescriptorMessage message);
  void fail(Error error);
  void release();

  Environment& environment_;
  Owner& owner_;
  const std::string address_;
  std::string name_;  // dialled
  std::string peer_;  // for people
  Descriptor socket_;
  std::optional<Descriptor> pidfd_;
  std::shared_ptr<memory::Segment> incoming_;
  Descriptor bell_;
  io::Loop::WatchId watch_ = 0;
  io::Loop::TimerKey deadline_{};
  io::Loop::TimerKey retry_{};
  bool failed_ = false;
  bool dropped_ = false;
};

}  // namespace moolink::transport::shm
