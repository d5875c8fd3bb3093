#pragma once

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/at_fork.h"
#include "base/descriptor.h"
#include "base/thread_safety.h"
#include "io/loop.h"
#include "io/task_thread.h"
#include "transport/admission.h"
#include "transport/listener.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/interface.h"
#include "transport/tcp/openssl.h"
#include "transport/tcp/tls.h"
#include "transport/transport.h"

namespace moolink::transport::tcp {

class TcpTransport final : public Transport, public Owner {
 public:
  explicit TcpTransport(Environment& environment, const OpenSslFound& openssl = find_openssl());
  ~TcpTransport() override;

  wire::PathKind kind() const override { return wire::PathKind::tcp; }
  bool accepts(const std::string& address) const override;
  void check(const std::string& address) const override;
  std::vector<std::string> listen(const std::string& address) MOOLINK_LOCKED override;
  std::vector<std::string> announced(const std::string& advertise,
                                     const std::vector<std::string>& bound) const override {
    return advertised(advertise, bound);
  }
  void dial(const std::string& address) MOOLINK_LOCKED override;
  void stop() MOOLINK_LOCKED override;
  void abandon() noexcept override;

 private:
  // One address after the other, until one answers.
  struct Dial {
    std::string address;
    std::vector<SocketAddress> candidates;
    std::size_t next = 0;
    Descriptor socket;
    io::Loop::Watch watch;
    io::Loop::Timer timer;
    bool all_refused = true;
    std::string failure;
    std::optional<StreamOffer> offer;  // the stream that it is for, if any
  };
  using DialId = std::uint64_t;

  void ended(wire::ConnectionId id) MOOLINK_LOCKED override;
  void established(wire::ConnectionId id) MOOLINK_LOCKED override { admission_.authenticated(id); }
  std::string why_plain() const MOOLINK_LOCKED override;
  void not_opened(TcpConnection& connection, const HandshakeFailure& failure)
      MOOLINK_LOCKED override;
  void dial_stream(TcpConnection& connection, const StreamOffer& offer) MOOLINK_LOCKED override;
  TcpConnection* find(wire::ConnectionId id) MOOLINK_LOCKED override;

  std::vector<std::string> listen_on_chosen(const std::string& address, std::uint16_t port)
      MOOLINK_LOCKED;
  void add_listener(Descriptor socket, bool dual_stack, std::vector<std::string>& bound)
      MOOLINK_LOCKED;
  void accepted(Descriptor socket, const SocketAddress& remote) MOOLINK_LOCKED;
  void adopt(Descriptor socket, const std::string& dialled_address, const std::string& source,
             std::optional<StreamOffer> offer = std::nullopt) MOOLINK_LOCKED;
  std::unique_ptr<ByteStream> stream_for(const TcpConnection& connection) MOOLINK_LOCKED;
  TlsTurns turns(const TcpConnection& connection) MOOLINK_LOCKED;
  // A token forbids unencrypted traffic that others can read.
  bool allows(const SocketAddress& address) const {
    return tls_ != nullptr || environment_.keyring.empty() || address.is_loopback();
  }
  std::string why_not_allowed() const MOOLINK_LOCKED;
  template <class Work>
  void event_of(DialId id, Work&& work) MOOLINK_LOCKED;
  void dial_ended(DialId id, const Error& error) MOOLINK_LOCKED;
  void tell_failed(const Dial& dial, ErrorCode code, const std::string& why) MOOLINK_LOCKED;
  void resolved(DialId id, std::vector<SocketAddress> candidates, const Error& error)
      MOOLINK_LOCKED;
  void dial_next(DialId id) MOOLINK_LOCKED;
  bool start_connect(DialId id, Dial& dial, const SocketAddress& candidate) MOOLINK_LOCKED;
  void attempt_failed(DialId id, const std::string& reason, bool refused) MOOLINK_LOCKED;
  void connected(DialId id) MOOLINK_LOCKED;

  Environment& environment_;
  Admission admission_;
  const InterfaceChoice choice_;
  const bool in_turns_;              // another thread encrypts and decrypts large transfers
  std::shared_ptr<TlsContext> tls_;  // null: connections are plain
  std::string why_no_tls_;
  // Keys that acceptors hold instead of the key offered first, by the address dialled.
  std::map<std::string, crypto::Key> keys_there_;
  std::list<Listener> listeners_;
  DialId last_dial_ = 0;
  std::unordered_map<DialId, Dial> dials_;
  std::unordered_map<wire::ConnectionId, std::shared_ptr<TcpConnection>> connections_;
  std::shared_ptr<bool> alive_;  // posted functions may run after the end
  // Shared with the thread of names_, which may outlive the transport and the loop.
  struct Results {
    std::mutex mutex;  // under it, results are posted to the loop
    HeldOverForks over_forks{mutex};
    io::Loop* loop = nullptr;  // null once the transport has ended
  };
  const std::shared_ptr<Results> results_;
  // Looks up host names. Its destructor does not wait for a name server.
  io::TaskThread names_{"moolink names", io::TaskThread::AtEnd::leave};
  // Last member: its thread must end first.
  std::optional<io::TaskThread> tls_thread_{"moolink tls"};  // until stop()
};

}  // namespace moolink::transport::tcp
