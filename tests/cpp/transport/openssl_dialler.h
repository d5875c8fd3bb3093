#pragma once

// A TLS dialler made with OpenSSL alone, which shows a job's key and tells the secrets of its
// records.

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "crypto/keyring.h"
#include "transport/tcp/openssl.h"

namespace moolink::transport {

// A function that moolink itself does not call.
template <class Signature>
Signature* openssl_function(const char* name) {
  static void* const library = dlopen(tcp::find_openssl().where.c_str(), RTLD_NOW);
  void* found = dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(std::string("OpenSSL has no ") + name);
  return reinterpret_cast<Signature*>(found);
}

class OpenSslDialler {
 public:
  OpenSslDialler(int socket, const crypto::Key& key)
      : key_(key), identity_(key.identity()), context_(openssl().context_new(openssl().method())) {
    constexpr int kSetMode = 33;    // SSL_CTRL_MODE
    constexpr long kModes = 1 | 2;  // partial writes, a buffer that moves
    openssl().context_control(context_, kSetMode, kModes, nullptr);
    openssl().context_set_use_key(context_, &show_key);
    using Log = void (*)(const tcp::Ssl* ssl, const char* line);
    openssl_function<void(tcp::SslContext*, Log)>("SSL_CTX_set_keylog_callback")(context_, &log);
    ssl_ = openssl().ssl_new(context_);
    openssl().ssl_set_data(ssl_, 0, this);
    if (openssl_function<int(tcp::Ssl*, int)>("SSL_set_fd")(ssl_, socket) != 1) {
      throw std::runtime_error("OpenSSL does not take a socket");
    }
    openssl().ssl_dial(ssl_);
  }
  ~OpenSslDialler() {
    openssl().ssl_free(ssl_);
    openssl().context_free(context_);
  }
  OpenSslDialler(const OpenSslDialler&) = delete;
  OpenSslDialler& operator=(const OpenSslDialler&) = delete;

  bool shake_hands() { return openssl().ssl_handshake(ssl_) == 1; }
  // Bytes taken or given; 0: not now, or the end (see heard_goodbye()).
  std::size_t write(std::span<const std::byte> bytes) {
    std::size_t count = 0;
    openssl().ssl_write(ssl_, bytes.data(), bytes.size(), &count);
    return count;
  }
  std::size_t read(std::span<std::byte> into) {
    std::size_t count = 0;
    openssl().ssl_read(ssl_, into.data(), into.size(), &count);
    return count;
  }
  // asks: the other side is to change its key, too. False: not now.
  bool update_key(bool asks) { return openssl().ssl_update_key(ssl_, asks ? 1 : 0) == 1; }
  void say_goodbye() { openssl().ssl_shut_down(ssl_); }
  bool heard_goodbye() const {
    constexpr int kZeroReturn = 6;  // SSL_ERROR_ZERO_RETURN
    return openssl().ssl_error(ssl_, 0) == kZeroReturn;
  }
  // Of what this side, and the other, sends after the handshake.
  const crypto::Digest& secret() const { return secrets_[0]; }
  const crypto::Digest& others_secret() const { return secrets_[1]; }

 private:
  static const tcp::OpenSsl& openssl() { return *tcp::find_openssl().functions; }
  static OpenSslDialler& of(const tcp::Ssl* ssl) {
    return *static_cast<OpenSslDialler*>(openssl().ssl_data(ssl, 0));
  }

  static int show_key(tcp::Ssl* ssl, const tcp::DigestMethod* /*digest*/,
                      const unsigned char** identity, std::size_t* size,
                      tcp::SslSession** session) {
    const OpenSslDialler& self = of(ssl);
    const crypto::Digest secret = self.key_.secret_for("tls");
    constexpr unsigned char kNumber[] = {0x13, 0x01};  // TLS_AES_128_GCM_SHA256
    *session = openssl().session_new();
    openssl().session_set_key(*session, reinterpret_cast<const unsigned char*>(secret.data()),
                              secret.size());
    openssl().session_set_cipher(*session, openssl().cipher_find(ssl, kNumber));
    openssl().session_set_version(*session, 0x0304);
    *identity = reinterpret_cast<const unsigned char*>(self.identity_.data());
    *size = self.identity_.size();
    return 1;
  }

  // "label random secret", in hexadecimal digits.
  static void log(const tcp::Ssl* ssl, const char* line) {
    const std::string_view text(line);
    const bool is_own = text.starts_with("CLIENT_TRAFFIC_SECRET_0 ");
    if (!is_own && !text.starts_with("SERVER_TRAFFIC_SECRET_0 ")) return;
    const std::string digits(text.substr(text.rfind(' ') + 1));
    crypto::Digest& secret = of(ssl).secrets_[is_own ? 0 : 1];
    for (std::size_t i = 0; i < secret.size(); ++i) {
      secret[i] = static_cast<std::byte>(std::stoi(digits.substr(2 * i, 2), nullptr, 16));
    }
  }

  const crypto::Key key_;
  const std::string identity_;
  std::array<crypto::Digest, 2> secrets_{};
  tcp::SslContext* context_;
  tcp::Ssl* ssl_ = nullptr;
};

}  // namespace moolink::transport
