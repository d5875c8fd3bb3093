#include "transport/tcp/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "base/error.h"

namespace moolink::transport::tcp {
namespace {

// From OpenSSL's headers.
constexpr int kTls13 = 0x0304;
constexpr int kSetMode = 33;                          // SSL_CTRL_MODE
constexpr int kClearMode = 78;                        // SSL_CTRL_CLEAR_MODE
constexpr long kAutoRetry = 0x04;                     // SSL_MODE_AUTO_RETRY
constexpr long kReleaseBuffers = 0x10;                // SSL_MODE_RELEASE_BUFFERS
constexpr int kSetSessionCache = 44;                  // SSL_CTRL_SET_SESS_CACHE_MODE
constexpr int kSetGroups = 92;                        // SSL_CTRL_SET_GROUPS_LIST
constexpr int kSetOldestVersion = 123;                // SSL_CTRL_SET_MIN_PROTO_VERSION
constexpr int kSetNewestVersion = 124;                // SSL_CTRL_SET_MAX_PROTO_VERSION
constexpr std::uint64_t kNoTicket = 1U << 14;         // SSL_OP_NO_TICKET
constexpr std::uint64_t kNoCompression = 1U << 17;    // SSL_OP_NO_COMPRESSION
constexpr std::uint64_t kNoRenegotiation = 1U << 30;  // SSL_OP_NO_RENEGOTIATION
constexpr int kVerifyPeer = 1;
constexpr int kBioSourceSink = 0x0400;
constexpr unsigned char kCipherNumber[] = {0x13, 0x01};  // TLS_AES_128_GCM_SHA256
// X25519 first: the key share of a dialler costs 40 µs with it, and ten times as much where a newer
// OpenSSL would add a post-quantum one. The shared key protects recorded traffic even if the
// exchange is broken later.
constexpr const char* kGroups = "X25519:P-256";

}  // namespace

TlsContext::TlsContext(crypto::Keyring keyring, std::uint64_t records_per_key)
    : openssl_(*find_openssl().functions),
      keyring_(std::move(keyring)),
      records_per_key_(records_per_key) {
  context_ = openssl_.context_new(openssl_.method());
  bio_method_ = openssl_.bio_method_new(kBioSourceSink, "moolink");
  try {
    configure();
  } catch (...) {
    openssl_.context_free(context_);
    openssl_.bio_method_free(bio_method_);
    throw;
  }
}

TlsContext::~TlsContext() {
  openssl_.context_free(context_);
  openssl_.bio_method_free(bio_method_);
}

void TlsContext::configure() {
  const auto need = [&](bool done, const char* what) {
    if (done) return;
    const char* reason = openssl_.error_reason(openssl_.first_error());
    throw Exception(ErrorCode::error, std::string("OpenSSL refuses ") + what + ": " +
                                          (reason == nullptr ? "it gives no reason" : reason));
  };
  openssl_.clear_errors();
  need(context_ != nullptr && bio_method_ != nullptr, "a context");
  need(openssl_.context_control(context_, kSetOldestVersion, kTls13, nullptr) == 1 &&
           openssl_.context_control(context_, kSetNewestVersion, kTls13, nullptr) == 1,
       "TLS 1.3");
  need(openssl_.context_set_ciphers(context_, kTlsCipher) == 1, kTlsCipher);
  // If X25519 is not allowed (FIPS), OpenSSL's own choice is used.
  openssl_.context_control(context_, kSetGroups, 0, const_cast<char*>(kGroups));
  need(openssl_.context_set_tickets(context_, 0) == 1, "to issue no tickets");
  openssl_.context_set_options(context_, kNoTicket | kNoCompression | kNoRenegotiation);
  openssl_.context_control(context_, kSetSessionCache, 0, nullptr);
  // An idle connection holds 32 KB less.
  openssl_.context_control(context_, kSetMode, kReleaseBuffers, nullptr);
  // SSL_read then returns after a handshake record or an alert, so that read_record() counts it.
  openssl_.context_control(context_, kClearMode, kAutoRetry, nullptr);
  // No certificate is trusted: only the key that both hold counts.
  openssl_.context_set_verify(context_, kVerifyPeer, nullptr);
  openssl_.context_set_use_key(context_, &TlsContext::use_key);
  openssl_.context_set_find_key(context_, &TlsContext::find_key);
  openssl_.bio_method_write(bio_method_, &TlsStream::write_records);
  openssl_.bio_method_read(bio_method_, &TlsStream::read_records);
  openssl_.bio_method_control(bio_method_, &TlsStream::control);
}

SslSession* TlsContext::session_of(Ssl* ssl, const crypto::Key& key) const {
  const crypto::Digest secret = key.secret_for("tls");
  const SslCipher* cipher = openssl_.cipher_find(ssl, kCipherNumber);
  SslSession* session = openssl_.session_new();
  if (session == nullptr || cipher == nullptr ||
      openssl_.session_set_key(session, reinterpret_cast<const unsigned char*>(secret.data()),
                               secret.size()) != 1 ||
      openssl_.session_set_cipher(session, cipher) != 1 ||
      openssl_.session_set_version(session, kTls13) != 1) {
    openssl_.session_free(session);
    return nullptr;
  }
  return session;
}

int TlsContext::use_key(Ssl* ssl, const DigestMethod* /*digest*/, const unsigned char** identity,
                        std::size_t* size, SslSession** session) {
  const auto& stream = *static_cast<TlsStream*>(find_openssl().functions->ssl_data(ssl, 0));
  *session = stream.context_->session_of(ssl, *stream.key_);
  *identity = reinterpret_cast<const unsigned char*>(stream.identity_.data());
  *size = stream.identity_.size();
  return *session == nullptr ? 0 : 1;
}

int TlsContext::find_key(Ssl* ssl, const unsigned char* identity, std::size_t size,
                         SslSession** session) {
  auto& stream = *static_cast<TlsStream*>(find_openssl().functions->ssl_data(ssl, 0));
  const TlsContext& context = *stream.context_;
  *session = nullptr;
  try {
    stream.identity_.assign(reinterpret_cast<const char*>(identity), size);
    const std::optional<crypto::Key> key = context.keyring_.find(stream.identity_);
    stream.known_ = key.has_value();
    if (key) *session = context.session_of(ssl, *key);
  } catch (const std::exception&) {
    return 0;
  }
  return 1;  // without a session the handshake fails: there is no certificate
}

}  // namespace moolink::transport::tcp
