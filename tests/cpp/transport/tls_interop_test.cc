// Peers that have the key and are not moolink: OpenSSL with its own settings, and records that
// OpenSSL would not send.

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <memory>
#include <span>
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
namespace tls_interop_test {

using conformance::pattern;
using conformance::Side;

// OpenSSL dials; a TlsStream accepts.
struct Interop {
  explicit Interop(std::uint64_t records_per_key) {
    std::array<int, 2> ends{};
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
    sockets = {Descriptor(ends[0]), Descriptor(ends[1])};
    dialler = std::make_unique<OpenSslDialler>(ends[0], key_of(7));
    stream = std::make_unique<tcp::TlsStream>(
        std::make_shared<tcp::TlsContext>(crypto::Keyring({key_of(7)}), records_per_key), ends[1],
        std::nullopt);
    bool done = false;
    bool accepted = false;
    for (int turns = 0; turns < 10 && !(done && accepted); ++turns) {
      done = done || dialler->shake_hands();
      accepted = accepted || stream->shake_hands();
    }
    CHECK(done && accepted);
  }

  std::array<Descriptor, 2> sockets;
  std::unique_ptr<OpenSslDialler> dialler;
  std::unique_ptr<tcp::TlsStream> stream;
};

TEST("tls interop: OpenSSL and a stream read each other, under changing keys") {
  for (const std::uint64_t records_per_key : {2, 1000000}) {
    Interop pair(records_per_key);
    const Buffer out = pattern(700001, 1);
    const Buffer back = pattern(600007, 2);
    std::vector<std::byte> got_out(out.size());
    std::vector<std::byte> got_back(back.size());
    std::size_t sent_out = 0;
    std::size_t sent_back = 0;
    std::size_t received_out = 0;
    std::size_t received_back = 0;
    const auto left = [](auto& buffer, std::size_t done, std::size_t most) {
      return std::min(most, buffer.size() - done);
    };
    for (std::size_t turn = 0; turn < 100000; ++turn) {
      if (received_out == out.size() && received_back == back.size()) break;
      const std::size_t piece = 1 + turn * 7919 % 40000;
      if (turn % 5 == 0) CHECK(pair.dialler->update_key(turn % 2 == 0));
      if (sent_out < out.size()) {
        sent_out += pair.dialler->write(out.span().subspan(sent_out, left(out, sent_out, piece)));
      }
      const iovec from{const_cast<std::byte*>(back.data() + sent_back),
                       left(back, sent_back, piece)};
      sent_back += pair.stream->send(std::span(&from, 1)).bytes;
      const iovec into{got_out.data() + received_out, left(got_out, received_out, piece)};
      received_out += pair.stream->receive(std::span(&into, 1), 100000).bytes;
      received_back += pair.dialler->read(
          std::span(got_back).subspan(received_back, left(got_back, received_back, piece)));
    }
    CHECK_EQ(received_out, out.size());
    CHECK_EQ(received_back, back.size());
    CHECK(std::memcmp(got_out.data(), out.data(), out.size()) == 0);
    CHECK(std::memcmp(got_back.data(), back.data(), back.size()) == 0);
  }
}

TEST("tls interop: each understands the other's end") {
  std::array<std::byte, 100> room{};
  const iovec into{room.data(), room.size()};
  Interop theirs(1000000);
  theirs.dialler->say_goodbye();
  CHECK(theirs.stream->receive(std::span(&into, 1), 1000).ended);
  Interop ours(1000000);
  CHECK(ours.stream->shut_down());
  CHECK_EQ(ours.dialler->read(room), 0u);
  CHECK(ours.dialler->heard_goodbye());
}

// Seals records of any type and length.
struct KeyHolder {
  explicit KeyHolder(const OpenSslDialler& dialler)
      : sealer(dialler.secret(), RecordCipher::Way::seal),
        opener(dialler.others_secret(), RecordCipher::Way::open) {}

  void seal(RecordType type, std::vector<std::byte> content) {
    const std::vector<std::byte> record = sealed_record(sealer, type, std::move(content));
    records.insert(records.end(), record.begin(), record.end());
  }
  // All at once.
  void send(const Descriptor& socket) {
    CHECK_EQ(::send(socket.get(), records.data(), records.size(), MSG_NOSIGNAL),
             static_cast<ssize_t>(records.size()));
    records.clear();
  }

  RecordCipher sealer;
  RecordCipher opener;
  std::vector<std::byte> records;
};

const std::vector<std::byte> kGoodbye = {std::byte{1}, std::byte{0}};

TEST("tls: nothing is received after the peer's close_notify") {
  Interop pair(1000000);
  KeyHolder holder(*pair.dialler);
  holder.seal(RecordType::data, std::vector<std::byte>(100));
  holder.seal(RecordType::alert, kGoodbye);
  holder.seal(RecordType::data, std::vector<std::byte>(100));
  holder.send(pair.sockets[0]);
  std::vector<std::byte> room(100);
  const iovec into{room.data(), room.size()};
  CHECK_EQ(pair.stream->receive(std::span(&into, 1), 100000).bytes, 100u);
  const auto last = pair.stream->receive(std::span(&into, 1), 100000);
  CHECK(last.ended && last.bytes == 0);
}

TEST("tls: a record of 16,384 bytes is taken, and a longer one is not") {
  for (const std::size_t more : {0, 1, 239, 240, 300}) {
    Interop pair(1000000);
    KeyHolder holder(*pair.dialler);
    holder.seal(RecordType::data, std::vector<std::byte>(tcp::kRecordBytes + more));
    holder.send(pair.sockets[0]);
    std::vector<std::byte> room(100);  // the rest is kept
    const iovec into{room.data(), room.size()};
    const auto receive = [&] { return pair.stream->receive(std::span(&into, 1), 100000); };
    if (more == 0) {
      CHECK_EQ(receive().bytes, room.size());
    } else {
      CHECK_THROWS(receive(), ErrorCode::wire);
    }
  }
}

TEST("tls: a peer that asks for another key gets one before anything else") {
  Interop pair(1000000);
  KeyHolder holder(*pair.dialler);
  holder.seal(RecordType::handshake, key_update(true));
  holder.send(pair.sockets[0]);
  std::vector<std::byte> words(100);
  const iovec piece{words.data(), words.size()};
  pair.stream->receive(std::span(&piece, 1), 1000);
  CHECK_EQ(pair.stream->send(std::span(&piece, 1)).bytes, words.size());
  std::vector<std::byte> heard(1000);
  const ssize_t count = ::recv(pair.sockets[0].get(), heard.data(), heard.size(), 0);
  const std::size_t update = tcp::kRecordHead + 5 + tcp::kRecordTail;
  const std::size_t data = tcp::kRecordHead + words.size() + tcp::kRecordTail;
  CHECK_EQ(count, static_cast<ssize_t>(update + data));
  auto type = RecordType::alert;
  const std::span<const std::byte> records(heard);
  CHECK(holder.opener.open(records.first(update), words, {}, type));
  CHECK(type == RecordType::handshake && words[0] == std::byte{24} && words[4] == std::byte{0});
  holder.opener.next_key();
  CHECK(holder.opener.open(records.subspan(update, data), words, {}, type));
  CHECK(type == RecordType::data);
}

TEST("tls: after a record without data, a partial record waits for its rest") {
  const std::vector<std::byte> kCancelled = {std::byte{1}, std::byte{90}};  // user_cancelled
  for (const int first : {0, 1, 2}) {
    Interop pair(1000000);
    KeyHolder holder(*pair.dialler);
    if (first == 0) holder.seal(RecordType::data, {});
    if (first == 1) holder.seal(RecordType::alert, kCancelled);
    if (first == 2) {
      holder.seal(RecordType::handshake, key_update(false));
      holder.sealer.next_key();
    }
    const std::size_t part = holder.records.size() + 100;
    holder.seal(RecordType::data, std::vector<std::byte>(10000));
    std::vector<std::byte> rest(holder.records.begin() + static_cast<std::ptrdiff_t>(part),
                                holder.records.end());
    holder.records.resize(part);
    std::vector<std::byte> room(20000);
    const iovec into{room.data(), room.size()};
    holder.send(pair.sockets[0]);
    CHECK_EQ(pair.stream->receive(std::span(&into, 1), 100000).bytes, 0u);
    holder.records = std::move(rest);
    holder.send(pair.sockets[0]);
    CHECK_EQ(pair.stream->receive(std::span(&into, 1), 100000).bytes, 10000u);
  }
}

TEST("tls: each KeyUpdate is answered at once, and too many end the connection") {
  Interop pair(1000000);
  KeyHolder holder(*pair.dialler);
  std::vector<std::byte> room(100);
  const iovec into{room.data(), room.size()};
  const auto ask = [&] {
    holder.seal(RecordType::handshake, key_update(true));
    holder.sealer.next_key();
    holder.send(pair.sockets[0]);
    return pair.stream->receive(std::span(&into, 1), 100000).bytes;
  };
  for (int i = 0; i < 32; ++i) {
    CHECK_EQ(ask(), 0u);
    CHECK(!pair.stream->unsent());
  }
  const auto ask_on = [&] {
    for (int i = 0; i < 100; ++i) ask();
  };
  CHECK_THROWS(ask_on(), ErrorCode::wire);
}

TEST("tls: a record after empty ones is read at once, although the socket has no more") {
  const conformance::Subject subject = with_keys({key_of(7)});
  Side b(subject);
  Side idle(subject);
  const Descriptor socket = plain_socket(b.transport->listen(subject.listen_address).at(0));
  CHECK_EQ(::fcntl(socket.get(), F_SETFL, O_NONBLOCK), 0);
  OpenSslDialler dialler(socket.get(), key_of(7));
  wait_until(b, idle, [&] { return dialler.shake_hands() && b.connections.size() == 1; });
  KeyHolder holder(dialler);
  for (int i = 0; i < 30; ++i) holder.seal(RecordType::data, {});
  holder.seal(RecordType::alert, kGoodbye);
  holder.send(socket);
  CHECK(wait_until(b, idle, [&] { return b.closures.size() == 1; }) &&
        b.closures[0].code == ErrorCode::peer_lost);
}

}  // namespace tls_interop_test
}  // namespace moolink::transport
