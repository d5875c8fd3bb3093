// The way of a snapshot to a newcomer whose parents send what they like. What is complete in the
// end has the bytes that its description sums up.

#include <optional>

#include "accumulate/snapshot.h"
#include "target.h"
#include "wire/crc32c.h"

namespace moolink::fuzz {
namespace {

using namespace moolink::accumulate;

constexpr std::size_t kMost = std::size_t{1} << 20;
constexpr SnapshotId kId{3, 9};

wire::Payload honest() {
  return {as_buffer(Bytes(100, std::byte{1})), {as_buffer(Bytes(300, std::byte{2})), Buffer()}};
}

void check(const SnapshotFetch& fetch) {
  const HeldSnapshot held = fetch.finish();
  const std::vector<std::uint32_t>& sums = held.info().crc32c;
  FUZZ_CHECK(sums.empty() || sums.size() == held.chunks());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    FUZZ_CHECK(wire::crc32c(held.chunk(i).span()) == sums[i]);
  }
}

}  // namespace

void run(Input input) {
  const auto memory = std::make_shared<CountingAllocator>(kMost);
  SnapshotFetch fetch(kId, memory, seconds(5));
  Time now(seconds(1));
  HeldSnapshot source(describe(kId, 1, honest(), 64), honest());
  if (input.chance()) source.add_checksums();
  fetch.set_parents(now, {Uid{1, 1}, Uid{1, 2}, Uid{1, 3}});
  while (!input.empty()) {
    now += milliseconds(1);
    switch (input.below(6)) {
      case 0: {
        const Buffer good = wire::encode(source.info());
        Bytes bytes(good.span().begin(), good.span().end());
        if (input.chance()) bend(input, bytes);
        try {
          refused([&] {
            fetch.set_info(now, wire::decode<SnapshotInfo>(std::span<const std::byte>(bytes)));
          });
        } catch (const std::bad_alloc&) {
          return;  // more than there is: the transfer ends
        }
        break;
      }
      case 1: {
        const std::uint32_t index = static_cast<std::uint32_t>(input.number());
        fetch.chunk(now, Uid{1, 1}, index, as_buffer(input.bytes()));
        break;
      }
      case 2: {
        const std::size_t index = input.number() % source.chunks();
        fetch.chunk(now, Uid{1, 1}, static_cast<std::uint32_t>(index), source.chunk(index));
        break;
      }
      case 3:
        fetch.give_up(now, Uid{1, input.byte()});
        break;
      case 4:
        for (const auto& request : fetch.next_requests(now)) FUZZ_CHECK(request.parent.high == 1);
        break;
      default: {
        const std::uint32_t index = static_cast<std::uint32_t>(input.number());
        if (fetch.has(index)) FUZZ_CHECK(fetch.chunk(index).size() <= kMost);
      }
    }
    if (fetch.complete()) return check(fetch);
  }
}

std::vector<Bytes> seeds() {
  Output whole;
  whole.byte(1).byte(0).byte(0).byte(4);
  for (std::uint64_t i = 0; i < 7; ++i) whole.byte(2).byte(i).byte(5).byte(i);
  Output bent;
  bent.byte(1).byte(0).byte(1).byte(1).number(5).byte(0).byte(200).byte(1).byte(3).bytes(Bytes(64));
  bent.byte(3).byte(1).byte(4);
  return {whole.take(), bent.take()};
}

}  // namespace moolink::fuzz
