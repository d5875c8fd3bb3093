#include <nanobind/ndarray.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <utility>

#include "bind/bindings.h"

namespace moolink::bind {

namespace nb = nanobind;

namespace {

// Words of memory that processes share, read and written atomically, in one order for all.
class SharedWords {
 public:
  using Array = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  explicit SharedWords(Array words) : words_(std::move(words)) {}

  std::uint64_t load(std::size_t index) const { return std::atomic_ref(word(index)).load(); }

  void store(std::size_t index, std::uint64_t value) { std::atomic_ref(word(index)).store(value); }

  std::uint64_t sum(std::size_t first, std::size_t stride, std::size_t count) const {
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < count; ++i) total += load(first + i * stride);
    return total;
  }

  // Writes the entry before it counts it, and counts it before it reads the next word.
  bool push(std::size_t line, std::size_t ring, std::size_t capacity, std::uint64_t entry) {
    const std::uint64_t position = load(line);
    store(ring + position % capacity, entry);
    store(line, position + 1);
    return load(line + 1) != 0;
  }

  // Silences the bell before it writes the goal, and writes the goal before it reads the sum again.
  bool ask(std::size_t goal, std::uint64_t wanted, std::size_t first, std::size_t stride,
           std::size_t count, int bell) {
    if (sum(first, stride, count) >= wanted) return true;
    if (load(goal) == wanted) return false;
    std::uint64_t rings = 0;
    if (read(bell, &rings, sizeof rings) < 0 && errno != EAGAIN) {
      throw std::system_error(errno, std::generic_category(), "a bell of an EnvPool");
    }
    store(goal, wanted);
    return sum(first, stride, count) >= wanted;
  }

  // Counts the request before it reads the goal.
  bool serve(std::size_t served, std::size_t goal, std::size_t first, std::size_t stride,
             std::size_t count) {
    store(served, load(served) + 1);
    const std::uint64_t wanted = load(goal);
    if (wanted == 0 || sum(first, stride, count) < wanted) return false;
    store(goal, 0);
    return true;
  }

 private:
  std::uint64_t& word(std::size_t index) const {
    if (index >= words_.size()) throw nb::index_error("there is no such word");
    return words_.data()[index];
  }

  Array words_;
};

}  // namespace

void bind_shared_words(nb::module_& m) {
  nb::class_<SharedWords>(
      m, "SharedWords",
      "Words of shared memory whose changes all processes see in one order. If two processes each "
      "write a word and then read the other's, at least one of them sees the other's write.")
      .def(nb::init<SharedWords::Array>(), nb::arg("words"),
           nb::sig("def __init__(self, words: numpy.typing.NDArray[numpy.uint64]) -> None"))
      .def("load", &SharedWords::load, nb::arg("index"),
           "Reads a word; raises IndexError if there is no such word.")
      .def("store", &SharedWords::store, nb::arg("index"), nb::arg("value"),
           "Writes a word; raises IndexError if there is no such word.")
      .def("sum", &SharedWords::sum, nb::arg("first"), nb::arg("stride"), nb::arg("count"),
           "Returns the sum of `count` words from `first`, `stride` apart.")
      .def("push", &SharedWords::push, nb::arg("line"), nb::arg("ring"), nb::arg("capacity"),
           nb::arg("entry"),
           "Writes `entry` into a ring and increments the ring's count, which is the word `line`. "
           "Returns whether the word after the count is set.")
      .def("ask", &SharedWords::ask, nb::arg("goal"), nb::arg("wanted"), nb::arg("first"),
           nb::arg("stride"), nb::arg("count"), nb::arg("bell"),
           "Returns whether the sum of the words from `first` is at least `wanted`. If it is not, "
           "and the word `goal` is not `wanted`, empties the eventfd `bell`, writes `wanted` into "
           "`goal` and reads the sum again.")
      .def("serve", &SharedWords::serve, nb::arg("served"), nb::arg("goal"), nb::arg("first"),
           nb::arg("stride"), nb::arg("count"),
           "Increments the word `served`. If the sum of the words from `first` reaches the word "
           "`goal`, clears `goal` and returns True. A `goal` of 0 is never reached.");
}

}  // namespace moolink::bind
