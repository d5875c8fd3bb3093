#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/descriptor.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/thread_safety.h"
#include "base/uid.h"
#include "crypto/keyring.h"
#include "memory/lending_pool.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::io {
class Loop;
}

namespace moolink::transport {

// All calls, in both directions, are made with the engine's lock held. A caller's request (write,
// close, dial) never calls the handler back before it has returned: the loop reports failures found
// there.
//
// The exception barrier: a connection in which something throws, for example for lack of memory,
// fails with an error that names the cause. write(), flush(), establish() and close() never throw.

// Memory at the receiver that the sender of a part may fill, on paths with traits().grants.
struct Grant {
  wire::GrantPlace place;
  MutableBuffer memory;  // the same bytes, mapped here; its release frees the grant
};

class Connection {
 public:
  virtual ~Connection() = default;

  virtual wire::ConnectionId id() const = 0;
  virtual wire::PathKind path() const = 0;
  virtual const wire::PathTraits& traits() const MOOLINK_LOCKED = 0;
  virtual const std::string& peer_address() const = 0;  // for people and logs
  // The address of this end on the path, with port 0: others near the peer may reach this host
  // there. Empty on paths without addresses.
  virtual std::string local_address() const MOOLINK_LOCKED { return {}; }

  // Queues a frame; its buffers are held by reference until they are written. After close() or a
  // failure it is dropped.
  virtual void write(wire::Frame frame) MOOLINK_LOCKED = 0;
  // Sends what write() has queued: called once after a batch of writes, so that frames written
  // together cost one system call, or one ring of the doorbell. The excess leaves later.
  virtual void flush() MOOLINK_LOCKED = 0;
  // Bytes given to write() that have not left yet. Above the high-water mark writable() is false,
  // and Handler::writable is called once the low-water mark is reached.
  virtual std::size_t queued_bytes() const MOOLINK_LOCKED = 0;
  virtual bool writable() const MOOLINK_LOCKED = 0;

  // The handshake is done: lifts its time limit and its limits on frame size and on the number of
  // unauthenticated connections.
  virtual void establish() MOOLINK_LOCKED = 0;
  // Tells the Hello::features that both peers have; called before establish().
  virtual void peers_have(std::uint64_t /*features*/) MOOLINK_LOCKED {}

  // Sends the queue for at most a moment, then closes. Handler::closed is not called.
  virtual void close() MOOLINK_LOCKED = 0;

  // Only on paths with grants. nullopt: no memory now, the part must come as chunks.
  virtual std::optional<Grant> allocate_grant(std::size_t /*bytes*/) MOOLINK_LOCKED {
    return std::nullopt;
  }
  // Copies into the peer's grant, in slices and off the lock if large; then Handler::grant_filled.
  // Throws Exception{wire} if the place is not one that the peer can have granted.
  virtual void fill_grant(const wire::GrantPlace& /*place*/, Buffer /*bytes*/) MOOLINK_LOCKED {
    throw Exception(ErrorCode::wire, "this path has no grants");
  }

  // Whether the path takes parts in this CUDA device's memory (device::Block), as far as known: by
  // fill_grant(), or as loans. write() reads only the host's memory.
  virtual bool reads_device(int /*device*/) const MOOLINK_LOCKED { return false; }
  // Why fill_grant() cannot read these bytes of a device; empty: it can.
  virtual std::string refusal_of(const Buffer& /*bytes*/) MOOLINK_LOCKED {
    return "the path cannot read them";
  }

  // The peer's memory of a grant, for this process to write; it stays mapped after the connection
  // has ended. Throws like fill_grant().
  virtual MutableBuffer grant_memory(const wire::GrantPlace& /*place*/) MOOLINK_LOCKED {
    throw Exception(ErrorCode::wire, "this path has no grants");
  }

  // Only on paths with traits().loans. Lets the peer map a segment of the lending pool; done once,
  // more calls cost nothing. False: not now, or the segment is gone.
  virtual bool pass_segment(std::uint64_t /*segment*/) MOOLINK_LOCKED { return false; }
  // Whether the peer has reported that it mapped the segment.
  virtual bool is_mapped(std::uint64_t /*segment*/) const MOOLINK_LOCKED { return false; }
  // The peer's bytes, for reading only; they stay mapped after the connection has ended. Throws
  // Exception{wire} if the peer has passed no such place, another code if the system refuses.
  virtual Buffer map_loan(const wire::LoanPlace& /*place*/) MOOLINK_LOCKED {
    throw Exception(ErrorCode::wire, "this path has no loans");
  }
  // The bytes of a whole segment that the peer has passed and this side has mapped. They stay
  // available after the connection has ended, while this object lives. Null: there is none.
  virtual LentBytes lent_bytes(std::uint64_t /*segment*/) const MOOLINK_LOCKED { return nullptr; }

  // Only between processes of one host: passes descriptors (segments, doorbells) to the peer, whose
  // handler gets them with the key. The caller keeps them. False: this path cannot, not now, or the
  // connection is closed.
  virtual bool share(const Uid& /*key*/, std::span<const int> /*descriptors*/) MOOLINK_LOCKED {
    return false;
  }
};

// Events of a transport; implemented by the runtime, which forwards them to the Node.
class Handler {
 public:
  virtual ~Handler() = default;

  // dialled_address: as given to Transport::dial; empty for an accepted connection.
  virtual void opened(std::shared_ptr<Connection> connection, const std::string& dialled_address)
      MOOLINK_LOCKED = 0;
  // The connection failed or the peer closed it; no more events follow. peer_dead: the path proves
  // that the peer's process has ended (pidfd); an end of file is no proof.
  virtual void closed(Connection& connection, const Error& error, bool peer_dead)
      MOOLINK_LOCKED = 0;
  // code peer_lost: the host answered that nothing listens there (ECONNREFUSED), which proves on
  // the peer's own host that its process is gone. Any other code: no answer. code auth: the two
  // sides do not have the same key; error.peer is the name that the other side claims, if any.
  virtual void dial_failed(const std::string& address, const Error& error) MOOLINK_LOCKED = 0;
  // A connection was refused before it was opened.
  virtual void turned_away(const Error& /*error*/) MOOLINK_LOCKED {}
  // This process has no descriptor or memory for a waiting connection; it is tried again.
  virtual void cannot_accept(const Error& /*error*/) MOOLINK_LOCKED {}

  virtual void received(Connection& connection, wire::ReceivedFrame frame) MOOLINK_LOCKED = 0;
  // Memory for the bytes of a chunk, of exactly head.bytes; empty: read and discard them.
  virtual std::span<std::byte> chunk_target(Connection& connection, const wire::ChunkHead& head)
      MOOLINK_LOCKED = 0;
  // The chunk is in its memory, or was discarded; called once for each. Other frames, and chunks
  // that were announced later, may be complete first.
  virtual void chunk_received(Connection& connection, const wire::ChunkHead& head)
      MOOLINK_LOCKED = 0;
  virtual void writable(Connection& connection) MOOLINK_LOCKED = 0;
  virtual void grant_filled(Connection& /*connection*/, const wire::GrantPlace& /*place*/)
      MOOLINK_LOCKED {}
  // The peer shared these, after the connection was established. The handler owns them now.
  virtual void shared(Connection& /*connection*/, const Uid& /*key*/,
                      std::vector<Descriptor> /*descriptors*/) MOOLINK_LOCKED {}
};

// Further sockets of a tcp connection, for the bytes of chunks.
struct StreamSettings {
  std::size_t most = 4;               // for each connection; 0: none
  Duration after = milliseconds(50);  // the connection's total wait for its socket before it asks
  bool within_host = false;           // for tests
};

// The environment of a transport. Everything in it outlives the transport.
struct Environment {
  io::Loop& loop;
  Allocator& allocator;  // for received frames; chunk targets come from the handler
  Handler& handler;
  Limits limits;
  Uid host_key;             // one kernel and network namespace: whether loopback reaches the peer
  std::string interface{};  // tcp/interface.h; empty: every one
  std::size_t max_unauthenticated = 256;  // connections that are not yet established
  Duration handshake_timeout = seconds(5);
  // Memory that this process lends; null: none. It outlives the transport; its blocks may live
  // longer.
  memory::LendingPool* lending = nullptr;
  // This peer's keys. Empty: it is insecure.
  crypto::Keyring keyring{};
  std::string name{};  // of this peer, public to every peer that reaches it
  // Whether another thread encrypts and decrypts large transfers in TLS. None: if this process may
  // run on enough processors.
  std::optional<bool> tls_thread{};
  StreamSettings streams{};

  wire::ConnectionId next_connection_id() MOOLINK_LOCKED { return ++last_connection_id; }
  wire::ConnectionId last_connection_id = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual wire::PathKind kind() const = 0;
  // Whether an address ("tcp://…") is one of this transport's.
  virtual bool accepts(const std::string& address) const = 0;
  // Throws Exception{invalid_argument} if such an address can never be dialled.
  virtual void check(const std::string& /*address*/) const {}
  // Listens and returns every address at which peers can dial this process; throws Exception with
  // the reason (in use, no such host, malformed).
  virtual std::vector<std::string> listen(const std::string& address) MOOLINK_LOCKED = 0;
  // The addresses to announce instead of those that listen() returned. Throws
  // Exception{invalid_argument} if they cannot be chosen, or are malformed.
  virtual std::vector<std::string> announced(const std::string& advertise,
                                             const std::vector<std::string>& /*bound*/) const {
    throw Exception(ErrorCode::invalid_argument,
                    "advertise='" + advertise + "' is of use for tcp addresses only");
  }
  // The address where this transport listens if another one's listener is bound to these
  // addresses; empty: it does not.
  virtual std::string beside(const std::vector<std::string>& /*bound*/) const { return {}; }
  // Ends in Handler::opened or Handler::dial_failed; throws only if the address is malformed.
  virtual void dial(const std::string& address) MOOLINK_LOCKED = 0;
  // Closes the listeners, the dials in progress and every connection; no more handler calls follow.
  virtual void stop() MOOLINK_LOCKED = 0;
  // In a forked child: closes every descriptor without telling the peers. Async-signal-safe enough
  // to run in pthread_atfork: no lock, no allocation, no handler.
  virtual void abandon() noexcept = 0;
};

}  // namespace moolink::transport
