#include "crypto/sha256.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"

namespace moolink::crypto {

namespace {

std::string hex(Bytes bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += "0123456789abcdef"[std::to_integer<int>(byte >> 4)];
    text += "0123456789abcdef"[std::to_integer<int>(byte & std::byte{15})];
  }
  return text;
}

std::vector<std::byte> filled(std::size_t size, int value) {
  return std::vector<std::byte>(size, static_cast<std::byte>(value));
}

// first, first + 1, ...
std::vector<std::byte> rising(int first, int last) {
  std::vector<std::byte> bytes;
  for (int value = first; value <= last; ++value) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

std::string hmac_hex(Bytes key, Bytes message) { return hex(hmac_sha256(key, message)); }

}  // namespace

TEST("sha256: the examples of NIST (FIPS 180)") {
  CHECK_EQ(hex(sha256({})),
           std::string("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
  CHECK_EQ(hex(sha256(bytes_of("abc"))),
           std::string("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
  CHECK_EQ(hex(sha256(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
           std::string("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
  CHECK_EQ(hex(sha256(filled(1'000'000, 'a'))),
           std::string("cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
}

// Digests by Python's hashlib.
TEST("sha256: messages that end on either side of a block's and a length's border") {
  const auto digest = [](std::size_t size) { return hex(sha256(filled(size, 'x'))); };
  CHECK_EQ(digest(55),
           std::string("d5e285683cd4efc02d021a5c62014694958901005d6f71e89e0989fac77e4072"));
  CHECK_EQ(digest(56),
           std::string("04c26261370ee7541549d16dee320c723e3fd14671e66a099afe0a377c16888e"));
  CHECK_EQ(digest(63),
           std::string("75220b47218278e656f2013bb8f0c455a25eaf01e86c64924e9d48d89776d6f2"));
  CHECK_EQ(digest(64),
           std::string("7ce100971f64e7001e8fe5a51973ecdfe1ced42befe7ee8d5fd6219506b5393c"));
  CHECK_EQ(digest(65),
           std::string("9537c5fdf120482f7d58d25e9ed583f52c02b4e304ea814db1633ad565aed7e9"));
  CHECK_EQ(digest(119),
           std::string("000b48d4edf0fa7bee3c6236ecd2785baa5db4eeb8bb54341b029e0d9fa5fb0c"));
  CHECK_EQ(digest(120),
           std::string("13f05a0b594787f5ecd315edc96141bd3243203d1b7d4f0836f37308b276ba98"));
}

TEST("sha256: in pieces as at once") {
  const std::vector<std::byte> message = rising(0, 255);
  for (std::size_t piece = 1; piece < 200; ++piece) {
    Sha256 hash;
    for (std::size_t at = 0; at < message.size(); at += piece) {
      hash.update(Bytes(message).subspan(at, std::min(piece, message.size() - at)));
    }
    CHECK(hash.finish() == sha256(message));
  }
}

TEST("hmac: the test cases of RFC 4231") {
  CHECK_EQ(hmac_hex(filled(20, 0x0b), bytes_of("Hi There")),
           std::string("b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"));
  CHECK_EQ(hmac_hex(bytes_of("Jefe"), bytes_of("what do ya want for nothing?")),
           std::string("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
  CHECK_EQ(hmac_hex(filled(20, 0xaa), filled(50, 0xdd)),
           std::string("773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"));
  CHECK_EQ(hmac_hex(rising(0x01, 0x19), filled(50, 0xcd)),
           std::string("82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"));
  CHECK_EQ(hmac_hex(filled(131, 0xaa),
                    bytes_of("Test Using Larger Than Block-Size Key - Hash Key First")),
           std::string("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
  CHECK_EQ(hmac_hex(filled(131, 0xaa),
                    bytes_of("This is a test using a larger than block-size key and a larger than "
                             "block-size data. The key needs to be hashed before being used by the "
                             "HMAC algorithm.")),
           std::string("9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"));
}

TEST("hkdf: the test cases of RFC 5869") {
  CHECK_EQ(hex(hkdf_sha256(filled(22, 0x0b), rising(0x00, 0x0c), rising(0xf0, 0xf9), 42)),
           std::string("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
                       "34007208d5b887185865"));
  CHECK_EQ(hex(hkdf_sha256(rising(0x00, 0x4f), rising(0x60, 0xaf), rising(0xb0, 0xff), 82)),
           std::string("b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
                       "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
                       "cc30c58179ec3e87c14c01d5c1f3434f1d87"));
  CHECK_EQ(hex(hkdf_sha256(filled(22, 0x0b), {}, {}, 42)),
           std::string("8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
                       "9d201395faa4b61a96c8"));
  CHECK_EQ(hkdf_sha256(filled(32, 1), {}, {}, 255 * 32).size(), 255UL * 32);
  CHECK_THROWS(hkdf_sha256(filled(32, 1), {}, {}, 255 * 32 + 1), ErrorCode::invalid_argument);
}

TEST("equal: every byte and both sizes count") {
  const std::vector<std::byte> bytes = rising(0, 31);
  CHECK(equal(bytes, rising(0, 31)));
  CHECK(equal({}, {}));
  CHECK(!equal(bytes, rising(0, 30)));
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::vector<std::byte> other = bytes;
    other[at] ^= std::byte{0x80};
    CHECK(!equal(bytes, other));
  }
}

}  // namespace moolink::crypto
