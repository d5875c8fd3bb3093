#include "runtime/peer/descriptor_exchange.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

#include "check.h"

namespace moolink::runtime {
namespace {

// Every descriptor of these tests is a copy of this one. Only those are counted: other threads of
// the process open and close their own meanwhile.
const Descriptor& original() {
  static const Descriptor file(::memfd_create("descriptor exchange", MFD_CLOEXEC));
  return file;
}

std::size_t open_descriptors() {
  struct stat counted{};
  CHECK_EQ(::fstat(original().get(), &counted), 0);
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    struct stat other{};
    if (::stat(entry.path().c_str(), &other) != 0) continue;  // closed meanwhile
    count += other.st_dev == counted.st_dev && other.st_ino == counted.st_ino;
  }
  return count;
}

std::vector<Descriptor> set_of(std::size_t count) {
  std::vector<Descriptor> made;
  for (std::size_t i = 0; i < count; ++i) {
    made.emplace_back(::fcntl(original().get(), F_DUPFD_CLOEXEC, 0));
    CHECK(made.back());
  }
  return made;
}

// Keys, and how many descriptors came for each, in the order in which they came.
using Sets = std::vector<std::pair<std::uint64_t, std::size_t>>;

struct Taken {
  Sets sets;

  DescriptorExchange::Taker by(std::uint64_t key) {
    return [this, key](std::vector<Descriptor> descriptors) {
      sets.emplace_back(key, descriptors.size());
    };
  }
};

}  // namespace

TEST("descriptor exchange: a set meets its taker, whichever is first, and once") {
  DescriptorExchange exchange;
  Taken taken;
  exchange.expect(Uid{0, 1}, taken.by(1));
  exchange.arrived(Uid{0, 2}, set_of(2));
  CHECK(taken.sets.empty());
  exchange.arrived(Uid{0, 1}, set_of(1));
  exchange.expect(Uid{0, 2}, taken.by(2));
  CHECK_EQ(taken.sets, (Sets{{1, 1}, {2, 2}}));
  exchange.expect(Uid{0, 2}, taken.by(2));
  CHECK_EQ(taken.sets.size(), std::size_t{2});
}

TEST("descriptor exchange: what is forgotten is closed, or nobody's") {
  const std::size_t before = open_descriptors();
  DescriptorExchange exchange;
  Taken taken;
  exchange.arrived(Uid{0, 1}, set_of(3));
  exchange.forget(Uid{0, 1});
  CHECK_EQ(open_descriptors(), before);
  exchange.expect(Uid{0, 2}, taken.by(2));
  exchange.forget(Uid{0, 2});
  exchange.arrived(Uid{0, 2}, set_of(1));
  CHECK(taken.sets.empty());
}

TEST("descriptor exchange: sixteen sets wait at most; the oldest are closed") {
  const std::size_t before = open_descriptors();
  DescriptorExchange exchange;
  Taken taken;
  for (std::uint64_t key = 0; key < 18; ++key) exchange.arrived(Uid{1, key}, set_of(1));
  CHECK_EQ(open_descriptors(), before + 16);
  for (std::uint64_t key = 0; key < 18; ++key) exchange.expect(Uid{1, key}, taken.by(key));
  CHECK_EQ(taken.sets.size(), std::size_t{16});
  CHECK_EQ(taken.sets.front().first, std::uint64_t{2});
}

TEST("descriptor exchange: 160 descriptors wait at most; the oldest sets are closed whole") {
  const std::size_t before = open_descriptors();
  DescriptorExchange exchange;
  exchange.arrived(Uid{0, 1}, set_of(80));
  exchange.arrived(Uid{0, 2}, set_of(80));
  CHECK_EQ(open_descriptors(), before + 160);
  exchange.arrived(Uid{0, 3}, set_of(1));
  CHECK_EQ(open_descriptors(), before + 81);
  exchange.abandon();
  CHECK_EQ(open_descriptors(), before);
}

}  // namespace moolink::runtime
