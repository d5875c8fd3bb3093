// TLS of tcp connections: strangers at both sides of a handshake, somebody between two peers, and
// one who has the key and keeps to no rule once the handshake is done.

#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <optional>

#include "base/descriptor.h"
#include "target.h"
#include "tests/cpp/transport/keys.h"
#include "tests/cpp/transport/openssl_dialler.h"
#include "transport/tcp/tls.h"

namespace moolink::fuzz {
namespace {

using namespace transport;  // NOLINT(google-build-using-namespace)
using tcp::RecordCipher;
using tcp::RecordType;

constexpr std::size_t kMostSteps = 40;
constexpr std::size_t kMostRoom = 50000;  // of one receive(): three records
constexpr std::size_t kMostSaid = 50000;  // in all: a socket holds it

// Keys change often.
const std::shared_ptr<tcp::TlsContext>& context() {
  constexpr std::uint64_t kRecords = 5;
  static const auto made =
      std::make_shared<tcp::TlsContext>(crypto::Keyring({key_of(1), key_of(2)}), kRecords);
  return made;
}

// What peers say.
const Bytes& words() {
  static const Bytes all = [] {
    Bytes bytes(kMostSaid);
    for (std::size_t i = 0; i < kMostSaid; ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 251);
    return bytes;
  }();
  return all;
}

// What has come must be what was said, as far as it goes.
bool begins(const Bytes& said, const Bytes& got) {
  if (got.size() > said.size()) return false;
  return got.empty() || std::memcmp(got.data(), said.data(), got.size()) == 0;
}

// One end of a connection, and the far end of its socket.
class End {
 public:
  explicit End(std::optional<crypto::Key> key) {
    std::array<int, 2> ends{};
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) ==
               0);
    near_ = Descriptor(ends[0]);
    far_ = Descriptor(ends[1]);
    stream_ = std::make_unique<tcp::TlsStream>(context(), ends[0], std::move(key));
  }

  bool is_open() const { return open_; }
  bool has_failed() const { return failed_; }
  wire::ChannelBinding binding() const { return stream_->binding(); }
  int far() const { return far_.get(); }
  void hang_up() { ::shutdown(far(), SHUT_WR); }
  // As much as the socket takes.
  std::size_t give(const Bytes& bytes) {
    const ssize_t count = ::send(far(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    return count > 0 ? static_cast<std::size_t>(count) : 0;
  }
  Bytes take() {
    int count = 0;
    FUZZ_CHECK(ioctl(far(), FIONREAD, &count) == 0);
    Bytes bytes(static_cast<std::size_t>(count));
    FUZZ_CHECK(count == 0 || ::recv(far(), bytes.data(), bytes.size(), 0) == count);
    return bytes;
  }

  void shake_hands() {
    if (open_ || failed_) return;
    failed_ = refused([&] { open_ = stream_->shake_hands(); },
                      {ErrorCode::auth, ErrorCode::peer_lost, ErrorCode::wire});
  }
  std::size_t send(const Bytes& said, std::size_t from, std::size_t middle, std::size_t to) {
    auto* bytes = const_cast<std::byte*>(said.data());
    const std::array<iovec, 2> pieces{iovec{bytes + from, middle - from},
                                      iovec{bytes + middle, to - middle}};
    std::size_t sent = 0;
    if (!failed_) failed_ = refused([&] { sent = stream_->send(pieces).bytes; }, kLost);
    return sent;
  }
  // Adds to what it got; false: nothing more.
  bool receive(Bytes& got, std::size_t first, std::size_t second, std::size_t allowance) {
    if (failed_) return false;
    Bytes one(first);
    Bytes two(second);
    const std::array<iovec, 2> into{iovec{one.data(), first}, iovec{two.data(), second}};
    tcp::ByteStream::Received now;
    failed_ = refused([&] { now = stream_->receive(into, allowance); }, kLost);
    FUZZ_CHECK(now.bytes <= first + second);
    one.resize(std::min(first, now.bytes));
    two.resize(now.bytes - one.size());
    got.insert(got.end(), one.begin(), one.end());
    got.insert(got.end(), two.begin(), two.end());
    return now.bytes > 0;
  }
  void receive(Input& input, Bytes& got) {
    const std::size_t room = 1 + input.number() % kMostRoom;
    const std::size_t first = input.chance() ? input.number() % room : 0;
    receive(got, first, room - first, 64 * input.below(256));
  }
  void receive_all(Bytes& got) {
    while (receive(got, 0, kMostRoom, kMostRoom)) {
    }
  }

 private:
  static constexpr std::initializer_list<ErrorCode> kLost = {ErrorCode::wire, ErrorCode::peer_lost};

  Descriptor near_;
  Descriptor far_;
  std::unique_ptr<tcp::TlsStream> stream_;
  bool open_ = false;
  bool failed_ = false;
};

// Has no key, and says what it likes.
void be_stranger(Input& input, bool is_dialled) {
  End end(is_dialled ? std::optional(key_of(1)) : std::nullopt);
  end.shake_hands();
  while (!input.empty() && !end.has_failed()) {
    end.give(input.bytes());
    end.shake_hands();
    end.take();
    FUZZ_CHECK(!end.is_open());
  }
  end.hang_up();
  end.shake_hands();
  FUZZ_CHECK(end.has_failed());
}

// Hands on what two peers say to each other, not always as they have said it.
class Between {
 public:
  explicit Between(Input& input) : input_(input) {}

  void run() {
    for (int turn = 0; turn < 3; ++turn) {
      dialler_.shake_hands();
      hand_on(dialler_, acceptor_);
      acceptor_.shake_hands();
      hand_on(acceptor_, dialler_);
    }
    const bool both = dialler_.is_open() && acceptor_.is_open();
    FUZZ_CHECK(both || touched_);
    if (!both) return;
    FUZZ_CHECK(dialler_.binding() == acceptor_.binding());
    for (std::size_t steps = 0; steps < kMostSteps && !input_.empty(); ++steps) {
      const bool forth = input_.chance();
      say(forth ? dialler_ : acceptor_, forth ? acceptor_ : dialler_, forth ? 0 : 1);
    }
    acceptor_.receive_all(got_[0]);
    dialler_.receive_all(got_[1]);
    for (std::size_t way = 0; way < 2; ++way) {
      FUZZ_CHECK(begins(said_, got_[way]) && got_[way].size() <= sent_[way]);
      FUZZ_CHECK(touched_ || got_[way].size() == sent_[way]);
    }
  }

 private:
  void say(End& from, End& to, std::size_t way) {
    const std::size_t left = said_.size() - sent_[way];
    const std::size_t size = std::min<std::size_t>(input_.number() % kMostRoom, left);
    const std::size_t first = size == 0 ? 0 : input_.number() % size;
    const std::size_t at = sent_[way];
    sent_[way] += from.send(said_, at, at + first, at + size);
    hand_on(from, to);
    to.receive(input_, got_[way]);
    FUZZ_CHECK(begins(said_, got_[way]));
  }
  void hand_on(End& from, End& to) {
    Bytes bytes = from.take();
    if (input_.chance()) {
      const Bytes before = bytes;
      bend(input_, bytes);
      touched_ = touched_ || bytes != before;
    }
    if (to.give(bytes) < bytes.size()) touched_ = true;
  }

  Input& input_;
  End dialler_{key_of(1)};
  End acceptor_{std::nullopt};
  const Bytes& said_ = words();
  std::array<std::size_t, 2> sent_{};
  std::array<Bytes, 2> got_;
  bool touched_ = false;
};

// Has the key, and seals records of any type, length and content.
class KeyHolder {
 public:
  explicit KeyHolder(Input& input) : input_(input), dialler_(end_.far(), key_of(2)) {
    for (int turn = 0; turn < 3; ++turn) {
      dialler_.shake_hands();
      end_.shake_hands();
    }
    FUZZ_CHECK(end_.is_open());
    sealer_.emplace(*tcp::find_openssl().functions, dialler_.secret(), RecordCipher::Way::seal);
  }

  void run() {
    for (std::size_t steps = 0; steps < kMostSteps && !input_.empty(); ++steps) {
      act();
      end_.receive(input_, got_);
      FUZZ_CHECK(begins(said_, got_));
    }
    end_.receive_all(got_);
    FUZZ_CHECK(begins(said_, got_));
  }

 private:
  void act() {
    switch (input_.below(8)) {
      case 0: {
        const auto type = static_cast<RecordType>(input_.byte());
        give(sealed(type, content()));
        break;
      }
      case 1:
        give(sealed(RecordType::handshake, {std::byte{24}, {}, {}, std::byte{1}, asks()}));
        sealer_->next_key();
        break;
      case 2:
        sealer_->next_key();
        break;
      case 3:
        give_bent(sealed(RecordType::data, content()));
        break;
      case 4:
        end_.send(words(), 0, input_.below(100), 100);
        end_.take();
        break;
      case 5:
        give(input_.bytes());
        break;
      case 6:
        end_.hang_up();
        break;
      default:
        give(sealed(RecordType::data, content()));
    }
  }
  void give(const Bytes& bytes) { end_.give(bytes); }
  void give_bent(Bytes record) {
    bend(input_, record);
    give(record);
  }
  std::byte asks() { return static_cast<std::byte>(input_.chance()); }
  Bytes content() {
    Bytes bytes = input_.bytes();
    if (input_.chance()) bytes.resize(input_.number() % (tcp::kRecordBytes + 300));
    return bytes;
  }
  Bytes sealed(RecordType type, Bytes content) {
    if (type == RecordType::data) said_.insert(said_.end(), content.begin(), content.end());
    Bytes record(tcp::kRecordHead + content.size() + tcp::kRecordTail);
    const iovec piece{content.data(), content.size()};
    sealer_->seal(type, std::span(&piece, 1), record.data());
    return record;
  }

  Input& input_;
  End end_{std::nullopt};
  OpenSslDialler dialler_;
  std::optional<RecordCipher> sealer_;
  Bytes said_;
  Bytes got_;
};

}  // namespace

void run(Input input) {
  switch (input.below(4)) {
    case 0:
      return be_stranger(input, false);
    case 1:
      return be_stranger(input, true);
    case 2:
      return Between(input).run();
    default:
      return KeyHolder(input).run();
  }
}

std::vector<Bytes> seeds() {
  Output strange;
  strange.byte(0);
  End dialler(key_of(2));
  dialler.shake_hands();
  strange.bytes(dialler.take());

  Output dialled;
  const wire::Refuse refusal{ErrorCode::auth, key_of(2).identity(), "stranger"};
  const wire::Frame frame = wire::make_frame(wire::FrameType::refuse, refusal);
  const auto header = wire::encode_header(frame.header);
  Bytes plain(header.begin(), header.end());
  plain.insert(plain.end(), frame.control.span().begin(), frame.control.span().end());
  dialled.byte(1).bytes(plain);

  Output between;
  between.byte(2).bytes({});  // 6 times handed on as it is
  between.byte(0).byte(0).byte(0).byte(0);
  for (int i = 0; i < 8; ++i) {
    between.byte(i).number(40000).number(20).byte(0).number(30000).byte(1).number(7).byte(200);
  }

  Output holder;
  holder.byte(3);
  const auto then_receive = [&] { holder.number(40000).byte(0).byte(255); };
  for (const std::uint64_t act : {7, 1, 7, 4, 0}) {
    holder.byte(act);
    if (act == 0) holder.byte(21);  // an alert: the last word
    if (act == 7 || act == 0) holder.bytes(Bytes{std::byte{1}, {}}).byte(0);
    if (act == 1) holder.byte(1);
    if (act == 4) holder.byte(50);
    then_receive();
  }
  return {strange.take(), dialled.take(), between.take(), holder.take()};
}

}  // namespace moolink::fuzz
