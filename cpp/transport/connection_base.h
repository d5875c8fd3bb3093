#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "base/barrier.h"
#include "base/thread_safety.h"
#include "io/loop.h"
#include "transport/frame_receiver.h"
#include "transport/send_queue.h"
#include "transport/transport.h"

namespace moolink::transport {

// The owner of connections: their transport.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  // The peer of this connection is authenticated.
  virtual void established(wire::ConnectionId /*id*/) MOOLINK_LOCKED {}
  // The connection is over; the owner forgets it.
  virtual void ended(wire::ConnectionId id) MOOLINK_LOCKED = 0;
};

// The common part of the connections of all paths: a queue and a receiver of frames, the exception
// barrier, and the end, which only the loop reports.
class ConnectionBase : public Connection, public std::enable_shared_from_this<ConnectionBase> {
 public:
  wire::ConnectionId id() const final { return id_; }
  const wire::PathTraits& traits() const MOOLINK_LOCKED final { return traits_; }
  const std::string& peer_address() const final { return peer_address_; }
  const std::string& dialled() const { return dialled_; }  // empty: accepted

  void write(wire::Frame frame) MOOLINK_LOCKED override;
  void flush() MOOLINK_LOCKED override;
  std::size_t queued_bytes() const MOOLINK_LOCKED override { return queue_.bytes(); }
  bool writable() const MOOLINK_LOCKED override { return !queue_.full(); }
  void establish() MOOLINK_LOCKED final;
  void close() MOOLINK_LOCKED override;

  // Ends it, and reports the error to the handler: as the failure of a dial if it was never opened.
  virtual void fail(Error error, bool peer_dead = false) noexcept MOOLINK_LOCKED;
  // Fails an unauthenticated connection to make room for others.
  void make_room() MOOLINK_LOCKED;
  // Closes at once without reporting it.
  void drop() MOOLINK_LOCKED;

 protected:
  enum class State { open, closing, closed };

  ConnectionBase(Environment& environment, ConnectionOwner& owner, std::string dialled,
                 std::size_t low_water, std::size_t high_water, OwnFrames* own = nullptr);

  // Sends as much of the queue as the path takes now. May throw.
  virtual void send_queued() MOOLINK_LOCKED = 0;
  // From now on, nothing is received into the handler's memory.
  virtual void silence() MOOLINK_LOCKED { receiver_.stop(); }
  // establish() was called for the first time. May throw.
  virtual void authenticated() MOOLINK_LOCKED { owner_.established(id_); }
  // Gives up the memory, descriptors and watches.
  virtual void release() MOOLINK_LOCKED = 0;
  // Reports the failure of a dial, after the end.
  virtual void not_opened(const Error& error) MOOLINK_LOCKED;
  // Closes it, and then reports the end to the handler.
  virtual void end(const Error& error, bool peer_dead) MOOLINK_LOCKED;
  // Replaces end() if nothing can be posted to the loop: nothing is reported.
  virtual void cut_off(const Error& /*error*/) MOOLINK_LOCKED { drop(); }
  virtual void finish_close() MOOLINK_LOCKED;
  // Returns idle grants to the system. False: nothing is left that a later call could return.
  virtual bool retire_grants() MOOLINK_LOCKED { return false; }

  bool usable() const MOOLINK_LOCKED { return state_ == State::open && !failed_; }
  // The exception barrier of the connection: false if it has failed.
  template <class Work>
  bool guarded(Work&& work) noexcept MOOLINK_LOCKED {
    return guard(work, [this](const Error& error) MOOLINK_LOCKED { fail(with_peer(error)); });
  }
  // The error of the connection's end: this one, with the peer's address.
  Error with_peer(const Error& error) const;
  // Limits the time until establish().
  void await_greeting() MOOLINK_LOCKED;
  // Reports the new connection to the handler.
  void open() MOOLINK_LOCKED;
  // The same as send_queued(); returns whether it sent anything.
  bool send_some() MOOLINK_LOCKED;
  // Tells the handler if the queue has run low. `of`: the connection in the report.
  void tell_writable(ConnectionBase& of) MOOLINK_LOCKED;
  // Called with each new grant: memory of grants unused for a while is returned to the system.
  void watch_idle_grants() MOOLINK_LOCKED;
  void begin_closing() MOOLINK_LOCKED;
  // Calls end() from the loop.
  void post_end(const Error& error, bool peer_dead) noexcept MOOLINK_LOCKED;

  static constexpr std::size_t kGreetingFrame = std::size_t{16} << 10;  // many times a greeting
  static constexpr Duration kLinger = seconds(1);  // a closing connection may send its queue

  Environment& environment_;
  ConnectionOwner& owner_;
  const wire::ConnectionId id_;
  const std::string dialled_;
  wire::PathTraits traits_;
  std::string peer_address_;
  SendQueue queue_;
  FrameReceiver receiver_;
  State state_ = State::open;
  bool told_ = false;         // the handler was told
  bool opened_ = false;       // ... and has taken it
  bool established_ = false;  // ... and has authenticated the peer
  bool failed_ = false;       // its end is reported soon
  io::Loop::Timer greeting_timer_;
  io::Loop::Timer timer_;  // of the present state

 private:
  io::Loop::Timer idle_timer_;  // while there are grants that may fall idle
};

}  // namespace moolink::transport
