// Hostile bytes: whatever arrives, the parsers throw ErrorCode::wire or return; run under
// AddressSanitizer this also shows that nothing is read outside the message.

#include <algorithm>
#include <array>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "value_example.h"
#include "wire/frame.h"
#include "wire/value.h"

namespace fuzz_test {

using namespace moolink;

constexpr int kIterations = 100000;

// Flips, overwrites, cuts, repeats and swells, as random bytes alone rarely get past the first tag.
// The result is of exactly the size used, so that a sanitizer notices one byte too many.
std::vector<std::byte> mutate(std::span<const std::byte> good, Random& random) {
  std::vector<std::byte> bytes(good.begin(), good.end());
  static constexpr std::uint8_t kEdges[] = {0, 1, 0x7f, 0x80, 0xff};
  const std::uint64_t changes = 1 + random.below(4);
  for (std::uint64_t i = 0; i < changes && !bytes.empty(); ++i) {
    const std::size_t at = random.below(bytes.size());
    switch (random.below(6)) {
      case 0:
        bytes[at] ^= static_cast<std::byte>(1U << random.below(8));
        break;
      case 1:
        bytes[at] = static_cast<std::byte>(random.next());
        break;
      case 2:
        bytes[at] = static_cast<std::byte>(kEdges[random.below(5)]);
        break;
      case 3:
        bytes.resize(at);
        break;
      case 4: {
        const std::size_t size = random.below(bytes.size() - at) + 1;
        const std::vector<std::byte> piece(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                                           bytes.begin() + static_cast<std::ptrdiff_t>(at + size));
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(random.below(bytes.size())),
                     piece.begin(), piece.end());
        break;
      }
      default:
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), random.below(12),
                     std::byte{0xff});
    }
  }
  bytes.shrink_to_fit();
  return bytes;
}

// How many of the mutants were still accepted; anything but a wire error fails the test.
template <class Parse>
int survivors(std::span<const std::byte> good, std::uint64_t seed, int iterations, Parse parse) {
  Random random(seed);
  int accepted = 0;
  for (int i = 0; i < iterations; ++i) {
    const std::vector<std::byte> bytes = mutate(good, random);
    try {
      parse(Buffer(nullptr, bytes.data(), bytes.size()));
      ++accepted;
    } catch (const Exception& e) {
      CHECK(e.error().code == ErrorCode::wire);
    }
  }
  return accepted;
}

TEST("fuzz: mutated values") {
  const wire::TypeHead record{"tests:Point", {"x", "y"}};
  const wire::TypeHead colour{"tests:Colour", {}};
  const wire::Payload good = wire::example::write_everything(record, colour);
  std::uint64_t checksum = 0;
  const int accepted = survivors(good.body.span(), 11, kIterations, [&](const Buffer& body) {
    wire::example::walk({body, good.parts}, Limits{}, checksum);
  });
  // Some mutants remain well-formed (another letter in a string), most do not.
  CHECK(accepted > 0 && accepted < kIterations);
}

TEST("fuzz: mutated control structs") {
  wire::Hello hello;
  hello.instance = {1, 2};
  hello.name = "learner";
  hello.rx_have = {5, 6};
  hello.addresses = {"tcp://127.0.0.1:4431"};
  const Buffer greeting = wire::encode(hello);
  survivors(greeting.span(), 12, kIterations / 5,
            [](const Buffer& bytes) { (void)wire::decode_hello(bytes); });
  wire::MessageHead head;
  head.parts.resize(4);
  const Buffer message = wire::encode(head);
  survivors(message.span(), 13, kIterations / 5,
            [](const Buffer& bytes) { (void)wire::decode_message_head(bytes, Limits{}); });
}

TEST("fuzz: random bytes as values and headers") {
  Random random(14);
  std::uint64_t checksum = 0;
  for (int i = 0; i < kIterations / 5; ++i) {
    std::vector<std::byte> bytes(random.below(64));
    for (std::byte& byte : bytes) {
      byte = static_cast<std::byte>(random.below(random.chance(1, 2) ? 24 : 256));
    }
    try {
      const Buffer body(nullptr, bytes.data(), bytes.size());
      wire::example::walk({body, {wire::example::zeros(8)}}, Limits{}, checksum);
    } catch (const Exception& e) {
      CHECK(e.error().code == ErrorCode::wire);
    }
    std::array<std::byte, wire::kHeaderBytes> header{};
    std::copy_n(bytes.begin(), std::min(bytes.size(), header.size()), header.begin());
    CHECK_THROWS(wire::decode_header(header, Limits{}), ErrorCode::wire);
  }
}

}  // namespace fuzz_test
