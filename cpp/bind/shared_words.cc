#include "bind/shared_words.h"

#include <atomic>

namespace moolink::bind {

std::uint64_t& SharedWords::word(std::size_t index) const {
  if (index >= words_.size()) throw nb::index_error("there is no such word");
  return words_.data()[index];
}

std::uint64_t SharedWords::load(std::size_t index) const {
  return std::atomic_ref(word(index)).load();
}

void SharedWords::store(std::size_t index, std::uint64_t value) {
  std::atomic_ref(word(index)).store(value);
}

void bind_shared_words(nb::module_& m) {
  nb::class_<SharedWords>(m, "SharedWords",
                          "Words of shared memory that all processes see change in one order: one "
                          "that writes its word and reads another's, and another that does so the "
                          "other way round, cannot both miss what the other has written.")
      .def(nb::init<SharedWords::Array>(), nb::arg("words"),
           nb::sig("def __init__(self, words: numpy.typing.NDArray[numpy.uint64]) -> None"))
      .def("load", &SharedWords::load, nb::arg("index"),
           "Reads a word; raises IndexError if there is none.")
      .def("store", &SharedWords::store, nb::arg("index"), nb::arg("value"),
           "Writes a word; raises IndexError if there is none.");
}

}  // namespace moolink::bind
