// Turns of TlsStream (tls_turns.cc), with a far end that has the key and chooses its records.

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "conformance.h"
#include "keys.h"
#include "openssl_dialler.h"
#include "records.h"
#include "tcp_subject.h"
#include "transport/tcp/tls.h"

namespace moolink::transport {
namespace tls_turns_test {

using conformance::message_frame;
using conformance::pattern;
using conformance::Side;
using conformance::wait_until;
using Bytes = std::vector<std::byte>;

// Seals records for a socket with the keys of a dialler.
class FarEnd {
 public:
  FarEnd(int socket, const OpenSslDialler& dialler)
      : socket_(socket),
        sealer_(dialler.secret(), RecordCipher::Way::seal),
        opener_(dialler.others_secret(), RecordCipher::Way::open) {}

  void seal(RecordType type, const Bytes& content) {
    const Bytes record = sealed_record(sealer_, type, content);
    records_.insert(records_.end(), record.begin(), record.end());
  }
  void seal_data(std::initializer_list<std::size_t> sizes) {
    for (const std::size_t size : sizes) seal(RecordType::data, Bytes(size));
  }
  // A KeyUpdate; with padding if `bytes` is larger.
  void seal_update(std::size_t bytes = 0) {
    Bytes content = key_update(false);
    content.push_back(static_cast<std::byte>(RecordType::handshake));
    content.resize(std::max(content.size(), bytes));
    seal(RecordType{}, content);
    sealer_.next_key();
  }
  // Sends as much as the socket takes. True: no record is left.
  bool give() {
    while (!records_.empty()) {
      const ssize_t count =
          ::send(socket_, records_.data(), records_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count <= 0) return false;
      records_.erase(records_.begin(), records_.begin() + count);
    }
    return true;
  }
  // Returns the content of the next record. None: no record has arrived.
  std::optional<Bytes> hear() {
    Bytes heard(5000);
    const ssize_t count = ::recv(socket_, heard.data(), heard.size(), MSG_DONTWAIT);
    if (count <= 0) return std::nullopt;
    const std::size_t sealed = tcp::sealed_bytes(heard.data());
    Bytes content(sealed - tcp::kRecordTail);
    auto type = RecordType::alert;
    CHECK(opener_.open(std::span(heard).first(tcp::kRecordHead + sealed), content, {}, type));
    return content;
  }

 private:
  int socket_;
  RecordCipher sealer_;
  RecordCipher opener_;
  Bytes records_;
};

// A stream that takes turns of at least `least` bytes. finish() runs the work of a turn.
struct Pair {
  explicit Pair(std::size_t least) {
    std::array<int, 2> ends{};
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
    sockets = {Descriptor(ends[0]), Descriptor(ends[1])};
    OpenSslDialler dialler(ends[0], key_of(7));
    stream = std::make_unique<tcp::TlsStream>(
        std::make_shared<tcp::TlsContext>(crypto::Keyring({key_of(7)})), ends[1], std::nullopt,
        tcp::TlsTurns{[this](std::function<void()> begun) { work = std::move(begun); }, least});
    bool done = false;
    bool accepted = false;
    for (int tries = 0; tries < 10 && !(done && accepted); ++tries) {
      done = done || dialler.shake_hands();
      accepted = accepted || stream->shake_hands();
    }
    CHECK(done && accepted);
    far.emplace(ends[0], dialler);
  }

  std::size_t receive(std::size_t most, std::size_t allowance = 400000) {
    Bytes room(most);
    const iovec into{room.data(), room.size()};
    return stream->receive(std::span(&into, 1), allowance).bytes;
  }
  std::size_t send(const Bytes& bytes) {
    const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
    return stream->send(std::span(&piece, 1)).bytes;
  }
  void finish() {
    if (work == nullptr) return;
    std::thread(std::exchange(work, nullptr)).join();
    stream->turned();
  }
  // Begins a turn that decrypts the records that the far end has sent.
  void begin_to_open() {
    CHECK(far->give());
    CHECK_EQ(receive(10), 10u);
    CHECK_EQ(receive(10), 0u);
    CHECK(stream->busy());
  }
  void receive_all() {
    while (receive(1000) > 0 || work != nullptr) finish();
  }

  std::array<Descriptor, 2> sockets;
  std::function<void()> work;
  std::unique_ptr<tcp::TlsStream> stream;
  std::optional<FarEnd> far;
};

TEST("tls turns: inside TLS a first byte of TLS is a wrong frame, also while a turn runs") {
  const conformance::Subject subject = with_keys({key_of(7)}, true);
  Side b(subject);
  b.establish_on_open = false;
  Side idle(subject);
  const Descriptor socket = plain_socket(b.transport->listen(subject.listen_address).at(0));
  CHECK_EQ(::fcntl(socket.get(), F_SETFL, O_NONBLOCK), 0);
  OpenSslDialler dialler(socket.get(), key_of(7));
  wait_until(b, idle, [&] { return dialler.shake_hands() && b.connections.size() == 1; });
  FarEnd far(socket.get(), dialler);
  for (int i = 0; i < 20; ++i) far.seal_update(16000);  // widens the window
  wait_until(b, idle, [&] { return far.give(); });
  for (int i = 0; i < 20; ++i) b.turn(milliseconds(1));
  for (int i = 0; i < 64; ++i) far.seal_update();  // as many as one receive() reads
  for (int i = 0; i < 100; ++i) far.seal(RecordType::data, Bytes(16000, std::byte{21}));
  wait_until(b, idle, [&] { return far.give() || !b.closures.empty(); });
  CHECK(wait_until(b, idle, [&] { return b.closures.size() == 1; }));
  CHECK(b.closures[0].code == ErrorCode::wire);
}

TEST("tls turns: bytes that a turn could not seal are not skipped") {
  Pair pair(50);
  pair.far->seal_data({100, 100, 100});
  pair.begin_to_open();  // makes room for what arrives in a turn
  pair.receive_all();
  Bytes update = key_update(false);
  const Bytes rest(update.begin() + 4, update.end());
  update.resize(4);  // OpenSSL writes nothing before the rest
  pair.far->seal(RecordType::handshake, update);
  CHECK(pair.far->give());
  pair.receive_all();
  CHECK_EQ(pair.send(Bytes(1000, std::byte{1})), 1000u);
  CHECK(pair.stream->busy());
  pair.far->seal(RecordType::handshake, rest);
  CHECK(pair.far->give());
  CHECK_EQ(pair.receive(1000), 0u);
  pair.finish();
  pair.send(Bytes(40, std::byte{2}));
  const auto heard = pair.far->hear();
  CHECK(!heard || heard->front() == std::byte{1});
  CHECK_THROWS(pair.receive(1000), ErrorCode::wire);
}

// Under ThreadSanitizer: the work and the loop share no data.
TEST("tls turns: the end of the socket is seen while a turn opens an empty record") {
  Pair pair(50);
  pair.far->seal_data({11, 100, 100, 0});
  pair.begin_to_open();
  std::thread other(std::exchange(pair.work, nullptr));
  ::shutdown(pair.sockets[0].get(), SHUT_WR);
  pair.receive(10);
  other.join();
  pair.stream->turned();
  CHECK_EQ(pair.receive(1000), 201u);
  CHECK_THROWS(pair.receive(1000), ErrorCode::peer_lost);
}

TEST("tls turns: the end of the socket is looked at once") {
  Pair pair(50);
  pair.far->seal_data({100, 100, 100});
  pair.begin_to_open();
  CHECK(pair.stream->takes_input());
  ::shutdown(pair.sockets[0].get(), SHUT_WR);
  CHECK_EQ(pair.receive(10), 0u);
  CHECK(!pair.stream->takes_input());  // it would be readable until turned()
}

TEST("tls turns: whole records that have left the socket are held") {
  Pair pair(60000);
  const auto say = [&](int records) {
    for (int i = 0; i < records; ++i) pair.far->seal_data({10000});
    pair.far->give();
  };
  say(10);
  CHECK_EQ(pair.receive(1), 1u);
  CHECK_EQ(pair.receive(1), 0u);  // a turn opens the others
  pair.finish();
  for (std::size_t got = 1; got < 100000;) got += pair.receive(100000 - got);
  const Bytes much(300000);
  pair.send(much);  // more than the socket takes
  pair.finish();
  say(4);
  CHECK_EQ(pair.receive(1), 1u);
  pair.send(much);  // a turn that opens nothing, while more arrives than in_ has room for
  CHECK(pair.stream->busy());
  say(20);
  pair.receive(1);
  pair.finish();
  bool more = true;
  while (more) {
    const bool held = pair.stream->holds_bytes() || pair.stream->busy();
    more = pair.receive(10000, 0) > 0 || pair.work != nullptr;
    CHECK(held || !more);
    pair.finish();
  }
}

TEST("tls turns: a stream that gets no thread does its work itself, and is not full for ever") {
  const auto context = std::make_shared<tcp::TlsContext>(crypto::Keyring({key_of(1)}));
  const tcp::TlsTurns none{[](const std::function<void()>&) { throw std::bad_alloc(); }, 1};
  std::array<int, 2> ends{};
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
  const std::array<Descriptor, 2> sockets{Descriptor(ends[0]), Descriptor(ends[1])};
  tcp::TlsStream dialler(context, ends[0], key_of(1), none);
  tcp::TlsStream acceptor(context, ends[1], std::nullopt, none);
  bool done[2] = {};
  for (int tries = 0; tries < 10 && !(done[0] && done[1]); ++tries) {
    done[0] = done[0] || dialler.shake_hands();
    done[1] = done[1] || acceptor.shake_hands();
  }
  CHECK(done[0] && done[1]);
  const Buffer all = pattern(100000, 7);
  const iovec piece{const_cast<std::byte*>(all.data()), all.size()};
  const auto taken = dialler.send(std::span(&piece, 1));
  CHECK_EQ(taken.bytes, all.size());
  CHECK(!taken.full && !dialler.unsent() && !dialler.busy());
  Bytes got(all.size());
  std::size_t received = 0;
  for (int tries = 0; tries < 100 && received < got.size(); ++tries) {
    const iovec rest{got.data() + received, got.size() - received};
    received += acceptor.receive(std::span(&rest, 1), got.size()).bytes;
  }
  CHECK_EQ(received, all.size());
  CHECK_EQ(std::memcmp(got.data(), all.data(), all.size()), 0);
}

TEST("tls turns: what was written before close() leaves when the transport stops") {
  for (const bool in_turns : {false, true}) {
    const conformance::Subject subject = with_keys({key_of(1)}, in_turns);
    Side a(subject);
    Side b(subject);
    conformance::connect(subject, a, b);
    b.send(message_frame(1, 100000));
    b.send(message_frame(2, 100));
    b.connection().close();
    b.transport->stop();
    CHECK(wait_until(a, [&] { return a.closures.size() == 1; }));
    CHECK_EQ(a.frames.size(), 2u);
  }
}

}  // namespace tls_turns_test
}  // namespace moolink::transport
