#include "transport/tcp/tls.h"

#include <malloc.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "conformance.h"
#include "keys.h"
#include "tcp_subject.h"
#include "transport/tcp/address.h"
#include "transport/tcp/transport.h"

namespace moolink::transport {
namespace tls_test {

using conformance::message_frame;
using conformance::pattern;
using conformance::same_bytes;
using conformance::Side;
using conformance::Subject;
using conformance::wait_until;

Subject insecure() { return with_keys({}); }

// A peer on a machine that has no OpenSSL.
Subject without_openssl(const crypto::Key& key) {
  return {"tcp without OpenSSL",
          [key](Environment& environment) {
            environment.keyring = crypto::Keyring({key});
            return std::make_unique<tcp::TcpTransport>(
                environment, tcp::OpenSslFound{nullptr, "", "", "it is not installed"});
          },
          "tcp://127.0.0.1:0", "tcp://127.0.0.1:port"};
}

const bool kAdded = [] {
  conformance::add_tests(with_keys({key_of(1)}));
  conformance::add_tests(with_keys({key_of(1)}, true));
  conformance::add_tests(without_openssl(key_of(1)));
  return true;
}();

bool mentions(const Error& error, const std::string& text) {
  return error.message.find(text) != std::string::npos;
}

// Between a dialler and an acceptor: what the network may do to bytes. Driven by the test.
class Middle {
 public:
  enum Way { there, back };
  // What becomes of a piece; it may change its size.
  using Fate = std::function<void(Way, std::vector<std::byte>& piece)>;

  explicit Middle(const std::string& target) : target_(target) {
    const auto any = tcp::resolve(tcp::parse_address("127.0.0.1:0")).at(0);
    listener_ = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    CHECK_EQ(::bind(listener_.get(), any.get(), any.size), 0);
    CHECK_EQ(::listen(listener_.get(), 8), 0);
  }

  std::string address() const { return tcp::local_address(listener_.get()).text(); }

  void turn() {
    if (Descriptor client{::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK)}; client) {
      const auto target = tcp::resolve(tcp::parse_address(target_)).at(0);
      ends_[there] = std::move(client);
      ends_[back] = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      CHECK_EQ(::connect(ends_[back].get(), target.get(), target.size), 0);
    }
    if (ends_[there]) carry(there);
    if (ends_[there]) carry(back);
  }

  void cut() {
    for (Descriptor& end : ends_) end.reset();
  }

  Fate fate = [](Way, std::vector<std::byte>&) {};
  std::size_t piece_bytes = 65536;
  std::array<std::vector<std::byte>, 2> carried;

 private:
  void carry(Way way) {
    std::vector<std::byte> piece(piece_bytes);
    const ssize_t count = ::recv(ends_[way].get(), piece.data(), piece.size(), MSG_DONTWAIT);
    if (count < 0) return;
    const int to = ends_[way == there ? back : there].get();
    if (count == 0) {
      ::shutdown(to, SHUT_WR);
      return;
    }
    piece.resize(static_cast<std::size_t>(count));
    fate(way, piece);
    carried[way].insert(carried[way].end(), piece.begin(), piece.end());
    // Blocks only if a side does not read, and then the test does not go on.
    ::send(to, piece.data(), piece.size(), MSG_NOSIGNAL);
  }

  std::string target_;
  Descriptor listener_;
  std::array<Descriptor, 2> ends_;
};

bool wait_through(Middle& middle, Side& a, Side& b, const std::function<bool()>& condition) {
  return wait_until(a, b, [&] {
    middle.turn();
    return condition();
  });
}

// a dials b; both hear that it was in vain, and not because a time was up.
void check_refused(Side& a, Side& b) {
  a.environment.handshake_timeout = b.environment.handshake_timeout = seconds(600);
  a.transport->dial(b.transport->listen("127.0.0.1:0").at(0));
  wait_until(a, b, [&] {
    return a.dial_failures.size() + a.closures.size() + a.frames.size() == 1 &&
           b.refusals.size() + b.closures.size() == 1;
  });
  for (const Side* side : {&a, &b}) {
    for (const auto* errors : {&side->dial_failures, &side->refusals, &side->closures}) {
      for (const Error& error : *errors) {
        CHECK(error.code == ErrorCode::auth);
        CHECK(mentions(error, errors == &side->refusals ? "127.0.0.1" : "tcp://127.0.0.1:"));
      }
    }
  }
}

TEST("tls: another token is refused, at both sides and at once") {
  Side a(with_keys({key_of(1)}));
  Side b(with_keys({key_of(2)}));
  b.environment.name = "b";
  check_refused(a, b);
  CHECK_EQ(a.dial_failures.size(), 1u);
  CHECK_EQ(b.refusals.size(), 1u);
  // The other's key; the own one is in the authenticator's advice.
  CHECK(mentions(a.dial_failures.at(0), "the same token"));
  CHECK(mentions(a.dial_failures[0], key_of(2).id()));
  CHECK(mentions(b.refusals.at(0), "the same token"));
  CHECK(mentions(b.refusals[0], key_of(1).id()));
  CHECK(mentions(a.dial_failures[0], "peer 'b'"));
  CHECK_EQ(a.dial_failures[0].peer, "b");
  // Who tries again is complained of in the same words, which are logged now and then only.
  a.transport->dial(b.transport->listen("127.0.0.1:0").at(0));
  wait_until(a, b, [&] { return b.refusals.size() == 2; });
  CHECK_EQ(b.refusals.at(0).message, b.refusals.at(1).message);
  CHECK(a.connections.empty());
  CHECK(b.connections.empty());
}

TEST("tls: while a token is changed either of two is good") {
  const std::vector<std::pair<std::vector<int>, std::vector<int>>> meet = {
      {{1}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 2}, {2}}, {{3, 1, 2}, {4, 2}}};
  for (const auto& [dialler, acceptor] : meet) {
    const auto keys = [](const std::vector<int>& numbers) {
      std::vector<crypto::Key> made;
      for (const int number : numbers) made.push_back(key_of(static_cast<std::uint64_t>(number)));
      return made;
    };
    Side a(with_keys(keys(dialler)));
    Side b(with_keys(keys(acceptor)));
    if (!conformance::connect(with_keys({}), a, b)) return;
    a.send(message_frame(1, 1000));
    wait_until(a, b, [&] { return b.frames.size() == 1; });
    CHECK(a.dial_failures.empty());
  }
}

TEST("tls: the key of a group opens that group only, and who holds the token meets all") {
  const crypto::Key job = key_of(1);
  const crypto::Key red = job.of_group("red");
  for (const auto& [dialler, acceptor] : {std::pair{job, red}, {red, job}, {red, red}}) {
    Side a(with_keys({dialler}));
    Side b(with_keys({acceptor}));
    conformance::connect(with_keys({}), a, b);
    CHECK(a.dial_failures.empty());
  }
  const crypto::Key blue = job.of_group("blue");
  for (const auto& [dialler, acceptor] :
       {std::pair{blue, red}, {key_of(2), red}, {red, key_of(2)}}) {
    Side a(with_keys({dialler}));
    Side b(with_keys({acceptor}));
    check_refused(a, b);
    CHECK(a.connections.empty());
    CHECK(b.connections.empty());
  }
}

TEST("tls: who does not encrypt and who does refuse one another at once") {
  const auto refused_by = [](const Subject& dialler, const Subject& acceptor) {
    Side a(dialler);
    Side b(acceptor);
    check_refused(a, b);
    CHECK(a.dial_failures.size() + a.frames.size() + a.closures.size() == 1);
    return b.refusals.empty() ? b.closures.at(0) : b.refusals.at(0);
  };
  CHECK(mentions(refused_by(with_keys({key_of(1)}), insecure()), "insecure=True"));
  CHECK(mentions(refused_by(with_keys({key_of(1)}), without_openssl(key_of(1))),
                 "it is not installed"));
  // A plain dialler says HELLO first.
  for (const Subject& plain : {insecure(), without_openssl(key_of(1))}) {
    Side a(plain);
    Side b(with_keys({key_of(1)}));
    a.transport->dial(b.transport->listen("127.0.0.1:0").at(0));
    wait_until(a, b, [&] { return a.connections.size() == 1; });
    a.send(wire::make_frame(wire::FrameType::hello, wire::Hello{}));
    wait_until(a, b, [&] { return a.closures.size() == 1 && b.refusals.size() == 1; });
    CHECK(a.frames.size() == 1 && a.frames[0].header.type == wire::FrameType::refuse);
    const auto refusal = wire::decode_control<wire::Refuse>(a.frames.at(0));
    CHECK(refusal.code == ErrorCode::auth);
    CHECK(refusal.text.find("encrypted connections only") != std::string::npos);
    CHECK(b.refusals[0].code == ErrorCode::auth);
    CHECK(b.connections.empty());
  }
}

TEST("tls: without OpenSSL a token allows loopback only") {
  Side a(without_openssl(key_of(1)));
  Side idle(insecure());
  for (const char* address : {":0", "0.0.0.0:0", "192.0.2.1:0", "[::]:0"}) {
    try {
      a.transport->listen(address);
      CHECK(!"listened where others may read");
    } catch (const Exception& e) {
      CHECK(mentions(e.error(), "it is not installed"));
      CHECK(mentions(e.error(), "insecure=True"));
    }
  }
  CHECK(a.transport->listen("localhost:0").at(0).starts_with("tcp://127."));
  a.transport->dial("192.0.2.1:1");
  wait_until(a, idle, [&] { return a.dial_failures.size() == 1; });
  CHECK(mentions(a.dial_failures[0], "loopback addresses only"));
}

TEST("tls: what OpenSSL is used, and why none") {
  const tcp::OpenSslFound& found = tcp::find_openssl();
  CHECK(found.functions != nullptr);
  CHECK(found.version.starts_with("OpenSSL 3."));
  CHECK(found.where.find("ssl") != std::string::npos);
  CHECK(tcp::look_for_openssl("none").functions == nullptr);
  CHECK(tcp::look_for_openssl("none").reason.find("MOOLINK_OPENSSL") != std::string::npos);
  const tcp::OpenSslFound absent = tcp::look_for_openssl("/no/such/libssl.so.3");
  CHECK(absent.functions == nullptr);
  CHECK(absent.reason.find("/no/such/libssl.so.3") != std::string::npos);
  const tcp::OpenSslFound other = tcp::look_for_openssl("libm.so.6");
  CHECK(other.functions == nullptr);
  CHECK(other.reason.find("no OpenSSL 3") != std::string::npos);
}

TEST("tls: frames that come byte by byte") {
  const Subject subject = with_keys({key_of(1)});
  Side a(subject);
  Side b(subject);
  Middle middle(b.transport->listen(subject.listen_address).at(0));
  middle.piece_bytes = 1;
  a.transport->dial(middle.address());
  wait_through(middle, a, b,
               [&] { return a.connections.size() == 1 && b.connections.size() == 1; });
  for (std::uint64_t seq = 1; seq <= 3; ++seq) {
    a.send(message_frame(seq, 100));
    b.send(message_frame(seq, 100));
  }
  wait_through(middle, a, b, [&] { return a.frames.size() == 3 && b.frames.size() == 3; });
  CHECK(same_bytes(b.frames.at(2).payload(), pattern(100, 3)));
}

TEST("tls: nothing that is sent can be read on the way") {
  const Subject subject = with_keys({key_of(1)});
  Side a(subject);
  Side b(subject);
  Middle middle(b.transport->listen(subject.listen_address).at(0));
  a.transport->dial(middle.address());
  wait_through(middle, a, b,
               [&] { return a.connections.size() == 1 && b.connections.size() == 1; });
  CHECK_EQ(std::string(a.connection().traits().cipher), "TLS_AES_128_GCM_SHA256");
  a.send(message_frame(1, 50000));
  wait_through(middle, a, b, [&] { return b.frames.size() == 1; });
  const Buffer secret = pattern(50000, 1);
  const auto& seen = middle.carried[Middle::there];
  for (std::size_t at = 0; at + 16 <= secret.size(); at += 16) {
    CHECK(std::search(seen.begin(), seen.end(), secret.data() + at, secret.data() + at + 16) ==
          seen.end());
  }
}

// The dialler's bytes are bent at one place of the handshake, or the acceptor's.
TEST("tls: a handshake with one byte bent fails, and nothing of it is believed") {
  const Subject subject = with_keys({key_of(1)});
  std::array<std::size_t, 2> length{};
  for (std::size_t at = 0; at < 2000; at += at < 20 ? 3 : 37) {
    for (const Middle::Way way : {Middle::there, Middle::back}) {
      if (at > 0 && at >= length[way]) continue;
      Side a(subject);
      Side b(subject);
      b.environment.handshake_timeout = a.environment.handshake_timeout = milliseconds(300);
      Middle middle(b.transport->listen(subject.listen_address).at(0));
      std::size_t seen = 0;
      if (at > 0) {
        middle.fate = [&](Middle::Way going, std::vector<std::byte>& piece) {
          if (going != way) return;
          if (at >= seen && at < seen + piece.size()) piece[at - seen] ^= std::byte{0x41};
          seen += piece.size();
        };
      }
      a.transport->dial(middle.address());
      if (at == 0) {
        wait_through(middle, a, b, [&] { return b.connections.size() == 1; });
        for (const auto each : {Middle::there, Middle::back}) {
          length[each] = middle.carried[each].size();
        }
        break;
      }
      // A length that was bent has the other side wait for more, for as long as it may.
      wait_through(middle, a, b, [&] {
        return a.dial_failures.size() + a.closures.size() == 1 &&
               b.refusals.size() + b.closures.size() == 1;
      });
      CHECK(a.frames.empty());
      CHECK(b.frames.empty());
      CHECK(b.connections.empty());
    }
  }
}

TEST("tls: what is no handshake is sent away, and costs nothing but its socket") {
  const Subject subject = with_keys({key_of(1)});
  Side b(subject);
  Side idle(subject);
  b.environment.handshake_timeout = milliseconds(300);
  const auto address = b.transport->listen(subject.listen_address).at(0);
  Random random(7);
  for (std::size_t i = 0; i < 60; ++i) {
    const Descriptor client = plain_socket(address);
    std::vector<std::byte> bytes(random.below(3000));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
    // Every other one begins as a handshake does: whole, or with more announced than comes.
    if (i % 2 == 0 && bytes.size() > 9) {
      const auto length = static_cast<std::uint16_t>(i % 4 == 0 ? bytes.size() - 5 : 0xffff);
      const std::array<int, 6> head{0x16, 3, 1, length >> 8, length & 0xff, 1};
      for (std::size_t k = 0; k < head.size(); ++k) bytes[k] = static_cast<std::byte>(head[k]);
    }
    if (!bytes.empty()) ::send(client.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (i % 3 == 0) ::shutdown(client.get(), SHUT_WR);
    wait_until(b, idle, [&] { return b.refusals.size() == i + 1; });
  }
  CHECK(b.connections.empty());
  CHECK(b.closures.empty());
}

// Of a stranger: records that OpenSSL would wait for more after.
std::vector<std::vector<std::byte>> unfinished_handshakes() {
  const auto bytes_of = [](std::initializer_list<int> values) {
    std::vector<std::byte> bytes;
    for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
    return bytes;
  };
  // A ClientHello that says it has 131,000 bytes, in a record of 40.
  std::vector<std::byte> long_message = bytes_of({22, 3, 1, 0, 40, 1, 1, 0xff, 0xb8});
  long_message.resize(45);
  // One whole, with no share of a key: another is asked for (HelloRetryRequest).
  std::vector<std::byte> no_share = bytes_of({22, 3, 1, 0, 76, 1, 0, 0, 72, 3, 3});
  no_share.resize(no_share.size() + 32);                        // random
  const auto rest = bytes_of({0, 0,  2, 0x13, 1, 1, 0, 0,  29,  //
                              0, 43, 0, 3,    2, 3, 4,          // TLS 1.3
                              0, 10, 0, 4,    0, 2, 0, 29,      // X25519
                              0, 13, 0, 4,    0, 2, 8, 4,       // RSA-PSS with SHA-256
                              0, 51, 0, 2,    0, 0});           // no share
  no_share.insert(no_share.end(), rest.begin(), rest.end());
  return {long_message, no_share, bytes_of({20, 3, 3, 0, 1, 1}), bytes_of({22, 3, 1, 0, 1, 1}),
          bytes_of({22, 3, 1, 0x40, 1})};
}

TEST("tls: who has OpenSSL wait for more before it has proven a key is refused") {
  const Subject subject = with_keys({key_of(1)});
  Side b(subject);
  Side idle(subject);
  const std::string address = b.transport->listen(subject.listen_address).at(0);
  for (const std::vector<std::byte>& words : unfinished_handshakes()) {
    const Descriptor client = plain_socket(address);
    CHECK_EQ(::send(client.get(), words.data(), words.size(), MSG_NOSIGNAL),
             static_cast<ssize_t>(words.size()));
    b.refusals.clear();
    wait_until(b, idle, [&] { return b.refusals.size() == 1; });
    CHECK(b.refusals[0].code == ErrorCode::auth);
  }
}

// What this process has of the allocator, mapped blocks too.
std::size_t allocated() {
  const auto all = mallinfo2();
  return all.uordblks + all.hblkhd;
}

TEST("tls: a stranger costs little memory, and no OpenSSL before it has said a whole thing") {
  constexpr std::size_t kStrangers = 200;
  // A handshake's beginning, and a frame's.
  const std::array<int, 9> record{0x16, 3, 1, 1, 0x40, 1, 0, 1, 0x3c};
  const std::array<int, 9> frame{1, 0, 0, 0, 99, 0, 0, 0, 0};
  for (const auto& [subject, words] :
       {std::pair{with_keys({key_of(1)}), record}, {insecure(), frame}}) {
    Side b(subject);
    b.establish_on_open = false;
    const std::string address = b.transport->listen(subject.listen_address).at(0);
    std::vector<Descriptor> strangers;
    strangers.reserve(kStrangers);
    const std::size_t before = allocated();
    while (strangers.size() < kStrangers) {
      strangers.push_back(plain_socket(address));
      for (const int word : words) ::send(strangers.back().get(), &word, 1, MSG_NOSIGNAL);
      b.turn(Duration::zero());
    }
    for (int turns = 0; turns < 50; ++turns) b.turn(Duration::zero());
    CHECK(b.refusals.empty());
    CHECK(allocated() - before < kStrangers * (std::size_t{24} << 10));
  }
}

// Two sides with a connection through a middle.
struct Pair {
  explicit Pair(const Subject& subject)
      : a(subject), b(subject), middle(b.transport->listen(subject.listen_address).at(0)) {
    a.transport->dial(middle.address());
    wait([this] { return a.connections.size() == 1 && b.connections.size() == 1; });
    a.send(message_frame(1, 100));
    wait([this] { return b.frames.size() == 1; });
  }
  void wait(const std::function<bool()>& condition) { wait_through(middle, a, b, condition); }

  Side a;
  Side b;
  Middle middle;
};

TEST("tls: a record that was bent, or is too long, ends the connection") {
  const auto bent = [](std::size_t at, int value) {
    Pair pair(with_keys({key_of(1)}));
    bool first = true;
    pair.middle.fate = [&](Middle::Way way, std::vector<std::byte>& piece) {
      if (way == Middle::there && std::exchange(first, false)) {
        piece[at] ^= static_cast<std::byte>(value);
      }
    };
    pair.a.send(message_frame(2, 40000));
    pair.a.send(message_frame(3, 40000));
    pair.wait([&] { return pair.b.closures.size() == 1; });
    CHECK_EQ(pair.b.frames.size(), 1u);
    CHECK(pair.b.closures[0].code == ErrorCode::wire);
    CHECK(mentions(pair.b.closures[0], "TLS"));
  };
  bent(3, 0xff);    // the record's length
  bent(100, 0x01);  // its content
  bent(0, 0x02);    // its type
}

TEST("tls: an end without a goodbye is told from one with it") {
  Pair cut(with_keys({key_of(1)}));
  cut.middle.cut();
  cut.wait([&] { return cut.b.closures.size() == 1 && cut.a.closures.size() == 1; });
  CHECK(cut.b.closures[0].code == ErrorCode::peer_lost);
  CHECK(mentions(cut.b.closures[0], "cut off"));
  Pair closed(with_keys({key_of(1)}));
  closed.a.connection().close();
  closed.wait([&] { return closed.b.closures.size() == 1; });
  CHECK(closed.b.closures[0].code == ErrorCode::peer_lost);
  CHECK(mentions(closed.b.closures[0], "closed by the peer"));
}

TEST("tls: one readiness takes a bounded number of small frames") {
  const Subject subject = with_keys({key_of(1)});
  Side a(subject);
  Side b(subject);
  if (!conformance::connect(subject, a, b)) return;
  const std::size_t frame_bytes = message_frame(1, 100).bytes();
  std::size_t most = 0;
  std::uint64_t sent = 0;
  for (std::size_t before = 0; before < (std::size_t{8} << 20) / frame_bytes;) {
    while (a.connection().writable()) a.send(message_frame(++sent, 100));
    a.turn(Duration::zero());
    b.turn(Duration::zero());
    most = std::max(most, b.frames.size() - before);
    before = b.frames.size();
  }
  CHECK(most * frame_bytes <= std::size_t{640} << 10);
}

}  // namespace tls_test
}  // namespace moolink::transport
