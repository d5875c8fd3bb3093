// TLS of tcp connections: unauthenticated peers at both sides of a handshake, an attacker between
// two peers, and a peer that has the key and breaks the rules after the handshake.

#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <functional>
#include <optional>
#include <utility>

#include "base/descriptor.h"
#include "target.h"
#include "tests/cpp/transport/keys.h"
#include "tests/cpp/transport/openssl_dialler.h"
#include "tests/cpp/transport/records.h"
#include "transport/tcp/tls.h"

namespace moolink::fuzz {
namespace {

using namespace transport;  // NOLINT(google-build-using-namespace)

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

// One end of a connection, and the far end of its socket. The work of a turn (tls_turns.cc) runs on
// this thread, before the socket is read or after a call.
class End {
 public:
  explicit End(std::optional<crypto::Key> key, bool in_turns = false) {
    std::array<int, 2> ends{};
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) ==
               0);
    near_ = Descriptor(ends[0]);
    far_ = Descriptor(ends[1]);
    tcp::TlsTurns turns;
    if (in_turns) turns = {[this](std::function<void()> work) { work_ = std::move(work); }, 200};
    stream_ = std::make_unique<tcp::TlsStream>(context(), ends[0], std::move(key), turns);
  }

  bool is_open() const { return open_; }
  bool has_failed() const { return failed_; }
  bool has_ended() const { return ended_; }
  wire::ChannelBinding binding() const { return stream_->binding(); }
  int far() const { return far_.get(); }
  void hang_up() { ::shutdown(far(), SHUT_WR); }
  // As much as the socket takes.
  std::size_t give(const Bytes& bytes) {
    const ssize_t count = ::send(far(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    return count > 0 ? static_cast<std::size_t>(count) : 0;
  }
  Bytes take() {
    finish_turn();
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
    const auto say = [&] { sent = stream_->send(pieces).bytes; };
    const bool busy = stream_->busy();
    if (!failed_) failed_ = refused(say, kLost);
    FUZZ_CHECK(!busy || sent == 0);
    if (busy && finish_turn() && !failed_) failed_ = refused(say, kLost);
    return sent;
  }
  bool shut_down() {
    FUZZ_CHECK(!stream_->busy() || !stream_->shut_down());
    finish_turn();
    return stream_->shut_down();
  }
  // Adds to what it got; false: nothing more, before the socket has more.
  bool receive(Bytes& got, std::size_t first, std::size_t second, std::size_t allowance) {
    if (failed_) return false;
    Bytes one(first);
    Bytes two(second);
    const std::array<iovec, 2> into{iovec{one.data(), first}, iovec{two.data(), second}};
    tcp::ByteStream::Received now;
    failed_ = refused([&] { now = stream_->receive(into, allowance); }, kLost);
    FUZZ_CHECK(now.bytes <= first + second);
    FUZZ_CHECK(!now.drained || !stream_->holds_bytes());
    FUZZ_CHECK(!(now.ended && now.bytes > 0) && (!ended_ || now.ended || failed_));
    ended_ = ended_ || now.ended;
    const bool finished = finish_turn();
    one.resize(std::min(first, now.bytes));
    two.resize(now.bytes - one.size());
    got.insert(got.end(), one.begin(), one.end());
    got.insert(got.end(), two.begin(), two.end());
    return !failed_ && (now.bytes > 0 || finished || stream_->holds_bytes());
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
  bool finish_turn() {
    if (work_ == nullptr) return false;
    FUZZ_CHECK(stream_->busy());
    std::exchange(work_, nullptr)();
    stream_->turned();
    failed_ = failed_ || refused([&] { stream_->send({}); }, kLost);
    return true;
  }

  static constexpr std::initializer_list<ErrorCode> kLost = {ErrorCode::wire, ErrorCode::peer_lost};

  Descriptor near_;
  Descriptor far_;
  std::unique_ptr<tcp::TlsStream> stream_;
  std::function<void()> work_;  // of a turn
  bool open_ = false;
  bool failed_ = false;
  bool ended_ = false;
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
  for (int turn = 0; turn < 2; ++turn) end.shake_hands();  // the first may leave bytes unread
  FUZZ_CHECK(end.has_failed());
}

// Hands on what two peers say to each other, not always as they have said it.
class Between {
 public:
  Between(Input& input, bool in_turns)
      : input_(input), dialler_(key_of(1), in_turns), acceptor_(std::nullopt, in_turns) {}

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
    if (!touched_) say_goodbye();
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
  void say_goodbye() {
    FUZZ_CHECK(!dialler_.has_failed() && !acceptor_.has_failed() && dialler_.shut_down());
    acceptor_.give(dialler_.take());
    acceptor_.receive_all(got_[0]);
    FUZZ_CHECK(acceptor_.has_ended() && !acceptor_.has_failed());
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
  End dialler_;
  End acceptor_;
  const Bytes& said_ = words();
  std::array<std::size_t, 2> sent_{};
  std::array<Bytes, 2> got_;
  bool touched_ = false;
};

// Has the key, and seals records of any type, length and content.
class KeyHolder {
 public:
  KeyHolder(Input& input, bool in_turns)
      : input_(input), end_(std::nullopt, in_turns), dialler_(end_.far(), key_of(2)) {
    for (int turn = 0; turn < 3; ++turn) {
      dialler_.shake_hands();
      end_.shake_hands();
    }
    FUZZ_CHECK(end_.is_open());
    sealer_.emplace(dialler_.secret(), RecordCipher::Way::seal);
    opener_.emplace(dialler_.others_secret(), RecordCipher::Way::open);
  }

  void run() {
    for (std::size_t steps = 0; steps < kMostSteps && !input_.empty(); ++steps) {
      act();
      end_.receive(input_, got_);
      FUZZ_CHECK(begins(said_, got_));
    }
    end_.receive_all(got_);
    hear();
    FUZZ_CHECK(begins(said_, got_));
    if (!keeps_rules_) return;
    FUZZ_CHECK(!end_.has_failed() && end_.has_ended() == said_goodbye_);
    FUZZ_CHECK(got_.size() == said_.size());
  }

 private:
  void act() {
    switch (input_.below(8)) {
      case 0: {
        const auto type = static_cast<RecordType>(input_.byte());
        give(said(type, content()));
        break;
      }
      case 1:
        update_key(input_.chance());
        break;
      case 2:
        keeps_rules_ = false;
        sealer_->next_key();
        break;
      case 3: {
        Bytes record = said(RecordType::data, content());
        bend(input_, record);
        keeps_rules_ = false;
        give(record);
        break;
      }
      case 4:
        have_it_speak(input_.chance());
        break;
      case 5:
        keeps_rules_ = false;
        give(input_.bytes());
        break;
      case 6:
        keeps_rules_ = false;
        end_.hang_up();
        break;
      default:
        give(said(RecordType::data, content()));
    }
  }
  void give(const Bytes& bytes) {
    if (end_.give(bytes) < bytes.size()) keeps_rules_ = false;
  }
  Bytes content() {
    Bytes bytes = input_.bytes();
    if (input_.chance()) bytes.resize(input_.number() % (tcp::kRecordBytes + 300));
    return bytes;
  }
  // A record, and what becomes of it: data of a record's size arrives, until a goodbye.
  Bytes said(RecordType type, Bytes content) {
    Bytes record = sealed_record(*sealer_, type, content);
    if (content.size() > tcp::kRecordBytes) keeps_rules_ = false;
    // Zeros at the end are padding; the type stands before them (RFC 8446, 5.2).
    while (type == RecordType{} && !content.empty()) {
      type = static_cast<RecordType>(content.back());
      content.pop_back();
    }
    const bool is_data = type == RecordType::data && content.size() <= tcp::kRecordBytes;
    const bool is_goodbye =
        type == RecordType::alert && content.size() == 2 && content[1] == std::byte{0};
    count(is_data && !content.empty());
    if (said_goodbye_ || !(is_data || is_goodbye)) {
      keeps_rules_ = false;
    } else if (is_data) {
      said_.insert(said_.end(), content.begin(), content.end());
    }
    said_goodbye_ = said_goodbye_ || is_goodbye;
    return record;
  }
  // A peer may send at most 32 consecutive records without data.
  void count(bool has_data) {
    without_data_ = has_data ? 0 : without_data_ + 1;
    if (without_data_ > 32) keeps_rules_ = false;
  }
  void update_key(bool asks) {
    count(false);
    if (said_goodbye_) keeps_rules_ = false;
    asked_ = asked_ || asks;
    give(sealed_record(*sealer_, RecordType::handshake, key_update(asks)));
    sealer_->next_key();
  }
  // Asked for another key, it gives one before it says more.
  void have_it_speak(bool has_heard_all) {
    if (has_heard_all) end_.receive_all(got_);
    hear();
    const bool owes_key = has_heard_all && asked_ && keeps_rules_;
    end_.send(words(), 0, input_.below(100), 100);
    FUZZ_CHECK(hear() == RecordType::handshake || !owes_key);
  }
  // What the end says, in whole records; returns the first one's type.
  std::optional<RecordType> hear() {
    std::optional<RecordType> first;
    const Bytes heard = end_.take();
    for (std::span<const std::byte> left = heard; !left.empty();) {
      FUZZ_CHECK(left.size() >= tcp::kRecordHead + tcp::kRecordTail);
      const std::size_t size = tcp::kRecordHead + tcp::sealed_bytes(left.data());
      FUZZ_CHECK(size <= left.size());
      Bytes content(size - tcp::kRecordHead - tcp::kRecordTail);
      auto type = RecordType::data;
      FUZZ_CHECK(opener_->open(left.first(size), content, {}, type));
      if (type == RecordType::handshake) {
        FUZZ_CHECK(content == key_update(false));
        opener_->next_key();
        asked_ = false;
      }
      first = first.value_or(type);
      left = left.subspan(size);
    }
    return first;
  }

  Input& input_;
  End end_;
  OpenSslDialler dialler_;
  std::optional<RecordCipher> sealer_;
  std::optional<RecordCipher> opener_;
  Bytes said_;
  Bytes got_;
  bool keeps_rules_ = true;  // so far: all that it said arrives
  bool said_goodbye_ = false;
  int without_data_ = 0;
  bool asked_ = false;  // for another key, and has not heard of one since
};

}  // namespace

void run(Input input) {
  const std::size_t way = input.below(8);
  const bool in_turns = way >= 4;
  switch (way % 4) {
    case 0:
      return be_stranger(input, false);
    case 1:
      return be_stranger(input, true);
    case 2:
      return Between(input, in_turns).run();
    default:
      return KeyHolder(input, in_turns).run();
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
  between.byte(2);
  for (int handed_on = 0; handed_on < 6; ++handed_on) between.byte(0);
  for (int i = 0; i < 8; ++i) {
    between.byte(i).number(5000).number(20).byte(0).number(30000).byte(1).number(7).byte(200);
  }

  // Records, key updates, and at last an alert; or one that is too long; or one after the last.
  enum Act : std::uint64_t { any = 0, update = 1, speak = 4, data = 7 };
  const auto holder = [](std::initializer_list<Act> acts, std::uint64_t length,
                         std::uint64_t allowance) {
    Output output;
    output.byte(3);
    for (const Act act : acts) {
      output.byte(act);
      if (act == any) output.byte(static_cast<std::uint8_t>(RecordType::alert));
      if (act == any) output.bytes(Bytes{std::byte{1}, {}}).byte(0);
      if (act == data) output.bytes({}).byte(1).number(length);
      if (act == update) output.byte(1);
      if (act == speak) output.byte(1).byte(50);
      output.number(40000).byte(0).byte(allowance);
    }
    return output.take();
  };
  return {strange.take(),
          dialled.take(),
          between.take(),
          holder({data, update, speak, data, any}, 5000, 255),
          holder({update, data, update, speak, any}, tcp::kRecordBytes, 0),
          holder({data, data}, tcp::kRecordBytes + 280, 255),
          holder({data, any, data}, 100, 0)};
}

}  // namespace moolink::fuzz
