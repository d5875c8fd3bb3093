#include "bind/pool_batch.h"

#include <algorithm>
#include <cstdint>
#include <span>

#include <nanobind/ndarray.h>

namespace moolink::bind {

namespace {

using Numbers = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstNumbers = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Copies numbers that are all within bounds; false, and nothing is copied, if one is not.
bool copy_within(const Numbers& room, const ConstNumbers& given, std::int64_t low,
                 std::int64_t high) {
  if (room.size() != given.size()) return false;
  const std::span numbers(given.data(), given.size());
  const auto fits = [=](std::int64_t number) { return low <= number && number <= high; };
  if (!std::all_of(numbers.begin(), numbers.end(), fits)) return false;
  std::copy(numbers.begin(), numbers.end(), room.data());
  return true;
}

}  // namespace

EpisodeCounts::EpisodeCounts(nb::handle reward, nb::handle terminated, nb::handle truncated,
                             nb::handle done, nb::handle episode_return, nb::handle episode_step,
                             nb::handle sum)
    : reward_(reward, PyBUF_CONTIG),
      terminated_(terminated, PyBUF_CONTIG),
      truncated_(truncated, PyBUF_CONTIG),
      done_(done, PyBUF_CONTIG),
      return_(episode_return, PyBUF_CONTIG),
      steps_(episode_step, PyBUF_CONTIG),
      sum_(sum, PyBUF_CONTIG),
      rows_(static_cast<std::size_t>(done_.view().len)) {
  for (const HeldBuffer* four : {&reward_, &return_}) {
    if (static_cast<std::size_t>(four->view().len) != 4 * rows_) {
      throw nb::value_error("rewards and returns are float32, one a row");
    }
  }
  for (const HeldBuffer* eight : {&steps_, &sum_}) {
    if (static_cast<std::size_t>(eight->view().len) != 8 * rows_) {
      throw nb::value_error("steps are int64 and sums float64, one a row");
    }
  }
  for (const HeldBuffer* flags : {&terminated_, &truncated_}) {
    if (static_cast<std::size_t>(flags->view().len) != rows_) {
      throw nb::value_error("flags are bool, one a row");
    }
  }
}

void EpisodeCounts::count_step() {
  const float* rewards = reward_.data<float>();
  const bool* terminated = terminated_.data<bool>();
  const bool* truncated = truncated_.data<bool>();
  bool* done = done_.data<bool>();
  float* returns = return_.data<float>();
  auto* steps = steps_.data<std::int64_t>();
  auto* sums = sum_.data<double>();
  for (std::size_t row = 0; row < rows_; ++row) {
    if (done[row]) {
      sums[row] = 0.0;
      steps[row] = 0;
    }
    if (begun_) {
      sums[row] += rewards[row];
      ++steps[row];
    }
    done[row] = terminated[row] || truncated[row];
    returns[row] = static_cast<float>(sums[row]);
  }
  begun_ = true;
}

void bind_pool_batch(nb::module_& m) {
  m.def(
      "copy_within", &copy_within, nb::arg("room").noconvert(), nb::arg("given").noconvert(),
      nb::arg("low"), nb::arg("high"),
      nb::sig("def copy_within(room: numpy.typing.NDArray[numpy.int64], given: "
              "numpy.typing.NDArray[numpy.int64], low: int, high: int) -> bool"),
      "Copies int64 numbers that are all from `low` to `high`; returns False, and copies nothing, "
      "if one is not, or there are too few or too many.");
  nb::class_<EpisodeCounts>(m, "EpisodeCounts",
                            "The episodes of a batch: what its steps' results add up to.")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle>(),
           nb::arg("reward"), nb::arg("terminated"), nb::arg("truncated"), nb::arg("done"),
           nb::arg("episode_return"), nb::arg("episode_step"), nb::arg("sum"),
           nb::sig("def __init__(self, reward: numpy.typing.NDArray[numpy.float32], terminated: "
                   "numpy.typing.NDArray[numpy.bool_], truncated: "
                   "numpy.typing.NDArray[numpy.bool_], done: numpy.typing.NDArray[numpy.bool_], "
                   "episode_return: numpy.typing.NDArray[numpy.float32], episode_step: "
                   "numpy.typing.NDArray[numpy.int64], sum: numpy.typing.NDArray[numpy.float64]) "
                   "-> None"),
           "The arrays of one batch; `sum` keeps returns in full precision.")
      .def("count_step", &EpisodeCounts::count_step,
           "Counts a step whose results are in the arrays; a batch's first one is a reset.");
}

}  // namespace moolink::bind
