#include "records.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "openssl_dialler.h"

namespace moolink::transport {
namespace {

// From OpenSSL's headers.
constexpr int kGetTag = 0x10;  // EVP_CTRL_AEAD_GET_TAG
constexpr int kSetTag = 0x11;  // EVP_CTRL_AEAD_SET_TAG

// OpenSSL's EVP_CIPHER functions.
struct CipherFunctions {
  const void* (*aes_128_gcm)();
  CipherContext* (*create)();
  void (*destroy)(CipherContext* context);
  int (*begin)(CipherContext* context, const void* cipher, void* engine, const unsigned char* key,
               const unsigned char* nonce, int seal);
  int (*update)(CipherContext* context, unsigned char* out, int* written, const unsigned char* in,
                int size);
  int (*end)(CipherContext* context, unsigned char* out, int* written);
  int (*control)(CipherContext* context, int command, int number, void* pointer);
};

const CipherFunctions& cipher() {
  static const CipherFunctions functions = [] {
    const auto find = [](const char* name, auto& function) {
      function = openssl_function<std::remove_pointer_t<std::decay_t<decltype(function)>>>(name);
    };
    CipherFunctions found{};
    find("EVP_aes_128_gcm", found.aes_128_gcm);
    find("EVP_CIPHER_CTX_new", found.create);
    find("EVP_CIPHER_CTX_free", found.destroy);
    find("EVP_CipherInit_ex", found.begin);
    find("EVP_CipherUpdate", found.update);
    find("EVP_CipherFinal_ex", found.end);
    find("EVP_CIPHER_CTX_ctrl", found.control);
    return found;
  }();
  return functions;
}

constexpr std::size_t kKeyBytes = 16;
constexpr std::size_t kTagBytes = 16;

// HKDF-Expand-Label with no context.
std::vector<std::byte> expand(const crypto::Digest& secret, std::string_view label,
                              std::size_t length) {
  std::vector<std::byte> info = {std::byte{0}, static_cast<std::byte>(length)};
  constexpr std::string_view kProtocol = "tls13 ";
  info.push_back(static_cast<std::byte>(kProtocol.size() + label.size()));
  for (const std::string_view part : {kProtocol, label}) {
    const crypto::Bytes bytes = crypto::bytes_of(part);
    info.insert(info.end(), bytes.begin(), bytes.end());
  }
  info.push_back(std::byte{0});  // the context's length
  return crypto::hkdf_expand(secret, info, length);
}

const unsigned char* chars(const void* data) { return static_cast<const unsigned char*>(data); }
unsigned char* chars(void* data) { return static_cast<unsigned char*>(data); }

std::array<std::byte, tcp::kRecordHead> head_of(std::size_t sealed) {
  return {std::byte{23}, std::byte{3}, std::byte{3}, static_cast<std::byte>(sealed >> 8),
          static_cast<std::byte>(sealed)};
}

void need(bool done) {
  if (!done) throw Exception(ErrorCode::error, "OpenSSL refuses to encrypt with AES-128-GCM");
}

}  // namespace

RecordCipher::RecordCipher(const crypto::Digest& secret, Way way)
    : way_(way), context_(cipher().create()), secret_(secret) {
  need(context_ != nullptr);
  derive();
}

RecordCipher::~RecordCipher() { cipher().destroy(context_); }

void RecordCipher::derive() {
  const std::vector<std::byte> key = expand(secret_, "key", kKeyBytes);
  std::ranges::copy(expand(secret_, "iv", iv_.size()), iv_.begin());
  sequence_ = 0;
  need(cipher().begin(context_, cipher().aes_128_gcm(), nullptr, chars(key.data()),
                      chars(iv_.data()), way_ == Way::seal ? 1 : 0) == 1);
}

void RecordCipher::next_key() {
  std::ranges::copy(expand(secret_, "traffic upd", secret_.size()), secret_.begin());
  derive();
}

void RecordCipher::begin(std::span<const std::byte> head) {
  std::array<std::byte, 12> nonce = iv_;
  for (std::size_t i = 0; i < 8; ++i) {
    nonce[nonce.size() - 1 - i] ^= static_cast<std::byte>(sequence_ >> (8 * i));
  }
  ++sequence_;
  int size = 0;
  need(cipher().begin(context_, nullptr, nullptr, nullptr, chars(nonce.data()), -1) == 1 &&
       cipher().update(context_, nullptr, &size, chars(head.data()),
                       static_cast<int>(head.size())) == 1);
}

std::byte* RecordCipher::seal(RecordType type, std::span<const iovec> pieces, std::byte* out) {
  std::size_t bytes = tcp::kRecordTail;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  const auto head = head_of(bytes);
  begin(head);
  out = std::copy(head.begin(), head.end(), out);
  const auto encrypt = [&](const void* data, std::size_t size) {
    if (size == 0) return;
    int done = 0;
    need(cipher().update(context_, chars(out), &done, chars(data), static_cast<int>(size)) == 1);
    out += done;
  };
  for (const iovec& piece : pieces) encrypt(piece.iov_base, piece.iov_len);
  encrypt(&type, sizeof type);
  int none = 0;
  need(cipher().end(context_, chars(out), &none) == 1 &&
       cipher().control(context_, kGetTag, kTagBytes, out) == 1);
  return out + kTagBytes;
}

bool RecordCipher::open(std::span<const std::byte> record, std::span<std::byte> first,
                        std::span<std::byte> rest, RecordType& type) {
  const std::size_t content = record.size() - tcp::kRecordHead - tcp::kRecordTail;
  const std::size_t placed = std::min(content, first.size());
  if (content - placed > rest.size()) return false;
  begin(record.first(tcp::kRecordHead));
  const std::byte* in = record.data() + tcp::kRecordHead;
  bool good = true;
  const auto decrypt = [&](void* data, std::size_t size) {
    int done = 0;
    good = good && (size == 0 || cipher().update(context_, chars(data), &done, chars(in),
                                                 static_cast<int>(size)) == 1);
    in += size;
  };
  decrypt(first.data(), placed);
  decrypt(rest.data(), content - placed);
  decrypt(&type, sizeof type);
  std::byte none{};
  int size = 0;
  return good && cipher().control(context_, kSetTag, kTagBytes, const_cast<std::byte*>(in)) == 1 &&
         cipher().end(context_, chars(&none), &size) == 1;
}

}  // namespace moolink::transport
