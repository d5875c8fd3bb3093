// The records of moolink's own against OpenSSL's record layer: two ends that shared a mistake would
// understand each other.

#include <dlfcn.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <memory>
#include <span>

#include "check.h"
#include "conformance.h"
#include "keys.h"
#include "transport/tcp/tls.h"

namespace moolink::transport {
namespace {

using conformance::pattern;
using tcp::OpenSsl;
using tcp::Ssl;
using tcp::SslSession;

constexpr int kSetMode = 33;    // SSL_CTRL_MODE
constexpr long kModes = 1 | 2;  // partial writes, a buffer that moves
constexpr int kZeroReturn = 6;  // SSL_ERROR_ZERO_RETURN

const OpenSsl& openssl() { return *tcp::find_openssl().functions; }

int show_key(Ssl* ssl, const tcp::DigestMethod* /*digest*/, const unsigned char** identity,
             std::size_t* size, SslSession** session) {
  static const std::string shown = key_of(7).identity();
  const crypto::Digest secret = key_of(7).secret_for("tls");
  constexpr unsigned char kNumber[] = {0x13, 0x01};
  *session = openssl().session_new();
  openssl().session_set_key(*session, reinterpret_cast<const unsigned char*>(secret.data()),
                            secret.size());
  openssl().session_set_cipher(*session, openssl().cipher_find(ssl, kNumber));
  openssl().session_set_version(*session, 0x0304);
  *identity = reinterpret_cast<const unsigned char*>(shown.data());
  *size = shown.size();
  return 1;
}

// OpenSSL, whole, as the dialler; a TlsStream accepts.
class Interop {
 public:
  explicit Interop(std::uint64_t records_per_key) : library_(dlopen(where(), RTLD_NOW)) {
    std::array<int, 2> ends{};
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
    sockets_ = {Descriptor(ends[0]), Descriptor(ends[1])};
    context_ = openssl().context_new(openssl().method());
    openssl().context_control(context_, kSetMode, kModes, nullptr);
    openssl().context_set_use_key(context_, &show_key);
    ssl_ = openssl().ssl_new(context_);
    CHECK_EQ((function<int(Ssl*, int)>("SSL_set_fd"))(ssl_, ends[0]), 1);
    openssl().ssl_dial(ssl_);
    stream = std::make_unique<tcp::TlsStream>(
        std::make_shared<tcp::TlsContext>(crypto::Keyring({key_of(7)}), records_per_key), ends[1],
        std::nullopt);
    bool done = false;
    bool accepted = false;
    for (int turns = 0; turns < 10 && !(done && accepted); ++turns) {
      done = done || openssl().ssl_handshake(ssl_) == 1;
      accepted = accepted || stream->shake_hands();
    }
    CHECK(done && accepted);
  }
  ~Interop() {
    openssl().ssl_free(ssl_);
    openssl().context_free(context_);
    dlclose(library_);
  }
  Interop(const Interop&) = delete;
  Interop& operator=(const Interop&) = delete;

  // Bytes taken or given; 0: not now, or the end (see error()).
  std::size_t write(std::span<const std::byte> bytes) {
    const auto call = function<int(Ssl*, const void*, int)>("SSL_write");
    return counted(call(ssl_, bytes.data(), static_cast<int>(bytes.size())));
  }
  std::size_t read(std::span<std::byte> into) {
    const auto call = function<int(Ssl*, void*, int)>("SSL_read");
    return counted(call(ssl_, into.data(), static_cast<int>(into.size())));
  }
  // asks: the stream is to change its key, too.
  void update_key(bool asks) {
    CHECK_EQ((function<int(Ssl*, int)>("SSL_key_update"))(ssl_, asks ? 1 : 0), 1);
  }
  void say_goodbye() { (function<int(Ssl*)>("SSL_shutdown"))(ssl_); }
  bool heard_goodbye() const { return openssl().ssl_error(ssl_, 0) == kZeroReturn; }

  std::unique_ptr<tcp::TlsStream> stream;

 private:
  static const char* where() { return tcp::find_openssl().where.c_str(); }
  template <class Signature>
  Signature* function(const char* name) const {
    void* found = dlsym(library_, name);
    CHECK(found != nullptr);
    return reinterpret_cast<Signature*>(found);
  }
  static std::size_t counted(int result) {
    return result > 0 ? static_cast<std::size_t>(result) : 0;
  }

  void* library_;
  std::array<Descriptor, 2> sockets_;
  tcp::SslContext* context_ = nullptr;
  Ssl* ssl_ = nullptr;
};

TEST("tls interop: OpenSSL's record layer and moolink's read each other, under changing keys") {
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
      if (turn % 5 == 0) pair.update_key(turn % 2 == 0);
      if (sent_out < out.size()) {
        sent_out += pair.write(out.span().subspan(sent_out, left(out, sent_out, piece)));
      }
      const iovec from{const_cast<std::byte*>(back.data() + sent_back),
                       left(back, sent_back, piece)};
      sent_back += pair.stream->send(std::span(&from, 1)).bytes;
      const iovec into{got_out.data() + received_out, left(got_out, received_out, piece)};
      received_out += pair.stream->receive(std::span(&into, 1), 100000).bytes;
      received_back += pair.read(
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
  theirs.say_goodbye();
  CHECK(theirs.stream->receive(std::span(&into, 1), 1000).ended);
  Interop ours(1000000);
  CHECK(ours.stream->shut_down());
  CHECK_EQ(ours.read(room), 0u);
  CHECK(ours.heard_goodbye());
}

}  // namespace
}  // namespace moolink::transport
