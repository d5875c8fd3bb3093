#pragma once

// The functions of OpenSSL 3 that moolink calls. They are declared by hand: handles are opaque and
// the rest are numbers, so that every machine can build moolink, and one without OpenSSL can run
// it. See docs/design/transport-tcp.md.

#include <cstddef>
#include <cstdint>
#include <string>

namespace moolink::transport::tcp {

using Ssl = struct SslObject;                // SSL
using SslContext = struct SslContextObject;  // SSL_CTX
using SslMethod = struct SslMethodObject;    // SSL_METHOD
using SslSession = struct SslSessionObject;  // SSL_SESSION
using SslCipher = struct SslCipherObject;    // SSL_CIPHER
using DigestMethod = struct DigestObject;    // EVP_MD
using Bio = struct BioObject;                // BIO
using BioMethod = struct BioMethodObject;    // BIO_METHOD

// The key that a dialler offers, with its identity; and the key of an identity that an acceptor
// receives.
using UseKey = int (*)(Ssl* ssl, const DigestMethod* digest, const unsigned char** identity,
                       std::size_t* size, SslSession** session);
using FindKey = int (*)(Ssl* ssl, const unsigned char* identity, std::size_t size,
                        SslSession** session);
using BioWrite = int (*)(Bio* bio, const char* data, std::size_t size, std::size_t* written);
using BioRead = int (*)(Bio* bio, char* data, std::size_t size, std::size_t* read);
using BioControl = long (*)(Bio* bio, int command, long number, void* pointer);

inline constexpr int kWantsRead = 2;  // SSL_ERROR_WANT_READ

// result, member, exported symbol, arguments
#define MOOLINK_OPENSSL_FUNCTIONS(X)                                                               \
  X(unsigned long, version_number, OpenSSL_version_num, ())                                        \
  X(const char*, version_text, OpenSSL_version, (int what))                                        \
  X(int, initialise, OPENSSL_init_ssl, (std::uint64_t options, const void* settings))              \
  X(void, clear_errors, ERR_clear_error, ())                                                       \
  X(unsigned long, first_error, ERR_peek_error, ())                                                \
  X(const char*, error_reason, ERR_reason_error_string, (unsigned long error))                     \
  X(BioMethod*, bio_method_new, BIO_meth_new, (int type, const char* name))                        \
  X(int, bio_method_write, BIO_meth_set_write_ex, (BioMethod * method, BioWrite write))            \
  X(int, bio_method_read, BIO_meth_set_read_ex, (BioMethod * method, BioRead read))                \
  X(int, bio_method_control, BIO_meth_set_ctrl, (BioMethod * method, BioControl control))          \
  X(void, bio_method_free, BIO_meth_free, (BioMethod * method))                                    \
  X(Bio*, bio_new, BIO_new, (const BioMethod* method))                                             \
  X(void, bio_set_data, BIO_set_data, (Bio * bio, void* data))                                     \
  X(void*, bio_data, BIO_get_data, (Bio * bio))                                                    \
  X(void, bio_set_ready, BIO_set_init, (Bio * bio, int ready))                                     \
  X(void, bio_set_flags, BIO_set_flags, (Bio * bio, int flags))                                    \
  X(void, bio_clear_flags, BIO_clear_flags, (Bio * bio, int flags))                                \
  X(const SslMethod*, method, TLS_method, ())                                                      \
  X(SslContext*, context_new, SSL_CTX_new, (const SslMethod* method))                              \
  X(void, context_free, SSL_CTX_free, (SslContext * context))                                      \
  X(long, context_control, SSL_CTX_ctrl,                                                           \
    (SslContext * context, int command, long number, void* pointer))                               \
  X(std::uint64_t, context_set_options, SSL_CTX_set_options,                                       \
    (SslContext * context, std::uint64_t options))                                                 \
  X(int, context_set_ciphers, SSL_CTX_set_ciphersuites, (SslContext * context, const char* names)) \
  X(int, context_set_tickets, SSL_CTX_set_num_tickets, (SslContext * context, std::size_t count))  \
  X(void, context_set_verify, SSL_CTX_set_verify,                                                  \
    (SslContext * context, int mode, int (*callback)(int, void*)))                                 \
  X(void, context_set_use_key, SSL_CTX_set_psk_use_session_callback,                               \
    (SslContext * context, UseKey callback))                                                       \
  X(void, context_set_find_key, SSL_CTX_set_psk_find_session_callback,                             \
    (SslContext * context, FindKey callback))                                                      \
  X(SslSession*, session_new, SSL_SESSION_new, ())                                                 \
  X(void, session_free, SSL_SESSION_free, (SslSession * session))                                  \
  X(int, session_set_key, SSL_SESSION_set1_master_key,                                             \
    (SslSession * session, const unsigned char* key, std::size_t size))                            \
  X(int, session_set_cipher, SSL_SESSION_set_cipher,                                               \
    (SslSession * session, const SslCipher* cipher))                                               \
  X(int, session_set_version, SSL_SESSION_set_protocol_version,                                    \
    (SslSession * session, int version))                                                           \
  X(Ssl*, ssl_new, SSL_new, (SslContext * context))                                                \
  X(void, ssl_free, SSL_free, (Ssl * ssl))                                                         \
  X(void, ssl_set_bio, SSL_set_bio, (Ssl * ssl, Bio * read, Bio * write))                          \
  X(int, ssl_set_data, SSL_set_ex_data, (Ssl * ssl, int index, void* data))                        \
  X(void*, ssl_data, SSL_get_ex_data, (const Ssl* ssl, int index))                                 \
  X(void, ssl_dial, SSL_set_connect_state, (Ssl * ssl))                                            \
  X(void, ssl_accept, SSL_set_accept_state, (Ssl * ssl))                                           \
  X(int, ssl_set_name, SSL_set_session_id_context,                                                 \
    (Ssl * ssl, const unsigned char* name, unsigned size))                                         \
  X(const SslCipher*, cipher_find, SSL_CIPHER_find, (Ssl * ssl, const unsigned char* number))      \
  X(int, ssl_handshake, SSL_do_handshake, (Ssl * ssl))                                             \
  X(int, ssl_export, SSL_export_keying_material,                                                   \
    (Ssl * ssl, unsigned char* out, std::size_t size, const char* label, std::size_t label_size,   \
     const unsigned char* data, std::size_t data_size, int use_data))                              \
  X(int, ssl_key_used, SSL_session_reused, (const Ssl* ssl))                                       \
  X(int, ssl_write, SSL_write_ex,                                                                  \
    (Ssl * ssl, const void* data, std::size_t size, std::size_t* written))                         \
  X(int, ssl_read, SSL_read_ex, (Ssl * ssl, void* data, std::size_t size, std::size_t* read))      \
  X(int, ssl_pending, SSL_pending, (const Ssl* ssl))                                               \
  X(int, ssl_update_key, SSL_key_update, (Ssl * ssl, int kind))                                    \
  X(int, ssl_shut_down, SSL_shutdown, (Ssl * ssl))                                                 \
  X(int, ssl_error, SSL_get_error, (const Ssl* ssl, int result))

struct OpenSsl {
// NOLINTBEGIN(bugprone-macro-parentheses): these are parts of a declarator
#define MOOLINK_OPENSSL_MEMBER(result, member, symbol, arguments) \
  result(*member) arguments = nullptr;
  MOOLINK_OPENSSL_FUNCTIONS(MOOLINK_OPENSSL_MEMBER)
#undef MOOLINK_OPENSSL_MEMBER
  // NOLINTEND(bugprone-macro-parentheses)
};

// OpenSSL as found in this process or on this machine.
struct OpenSslFound {
  const OpenSsl* functions = nullptr;  // null: none can be used
  std::string version;                 // "OpenSSL 3.0.22 25 Aug 2026"
  std::string where;                   // a file, or "in this process"
  std::string reason;                  // why there is none, for people
};

// Looks once, at the first call: at `MOOLINK_OPENSSL` (a file, or "none"), at libraries already
// loaded, beside the interpreter, and at the system's. A library that it finds stays loaded for
// ever.
const OpenSslFound& find_openssl();
// Looks again; `named` replaces the variable. For tests.
OpenSslFound look_for_openssl(const char* named);

}  // namespace moolink::transport::tcp
