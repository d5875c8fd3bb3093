// A pool's work on the arrays of one batch at each step: actions in, episodes counted.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "bind/bindings.h"
#include "bind/held_buffer.h"

namespace moolink::bind {
namespace {

// The array for a batch's actions, which are int64 numbers.
class ActionNumbers {
 public:
  ActionNumbers(nb::handle room, std::int64_t low, std::int64_t high)
      : room_(room, PyBUF_CONTIG | PyBUF_FORMAT), low_(low), high_(high) {
    if (room_.view().ndim != 1 || room_.view().itemsize != sizeof(std::int64_t)) {
      throw nb::value_error("actions are int64 numbers, one a row");
    }
  }

  // Copies an int64 array of one number for each row, if all are within the bounds. Returns false,
  // and copies nothing, for any other object.
  bool write(nb::handle given) {
    const std::byte* memory = exact_memory(given, room_.shape(), room_.view().format);
    if (memory == nullptr) return false;
    const std::span numbers(reinterpret_cast<const std::int64_t*>(memory),
                            static_cast<std::size_t>(room_.shape()[0]));
    const auto fits = [this](std::int64_t number) { return low_ <= number && number <= high_; };
    if (!std::ranges::all_of(numbers, fits)) return false;
    std::ranges::copy(numbers, room_.data<std::int64_t>());
    return true;
  }

 private:
  HeldBuffer room_;
  std::int64_t low_;
  std::int64_t high_;
};

// The episodes of a batch: the totals of its steps' results.
class EpisodeCounts {
 public:
  EpisodeCounts(nb::handle reward, nb::handle terminated, nb::handle truncated, nb::handle done,
                nb::handle episode_return, nb::handle episode_step, nb::handle sum)
      : reward_(reward, PyBUF_CONTIG),
        terminated_(terminated, PyBUF_CONTIG),
        truncated_(truncated, PyBUF_CONTIG),
        done_(done, PyBUF_CONTIG),
        return_(episode_return, PyBUF_CONTIG),
        steps_(episode_step, PyBUF_CONTIG),
        sum_(sum, PyBUF_CONTIG),
        rows_(static_cast<std::size_t>(done_.view().len)) {
    const std::pair<const HeldBuffer*, std::size_t> item_sizes[] = {
        {&reward_, 4}, {&return_, 4},     {&steps_, 8},
        {&sum_, 8},    {&terminated_, 1}, {&truncated_, 1}};
    for (const auto& [buffer, item_size] : item_sizes) {
      if (static_cast<std::size_t>(buffer->view().len) == item_size * rows_) continue;
      throw nb::value_error(
          "rewards and returns are float32, steps int64, sums float64 and flags bool, one a row");
    }
  }

  // Counts a step whose results are in the arrays; a batch's first one is a reset.
  void count_step() {
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

 private:
  HeldBuffer reward_;
  HeldBuffer terminated_;
  HeldBuffer truncated_;
  HeldBuffer done_;
  HeldBuffer return_;
  HeldBuffer steps_;
  HeldBuffer sum_;
  std::size_t rows_;
  bool begun_ = false;
};

}  // namespace

void bind_pool_batch(nb::module_& m) {
  nb::class_<ActionNumbers>(m, "ActionNumbers",
                            "The array of a batch's actions, which are int64 numbers.")
      .def(nb::init<nb::handle, std::int64_t, std::int64_t>(), nb::arg("room"), nb::arg("low"),
           nb::arg("high"), "`room` has one int64 element for each row.")
      .def("write", &ActionNumbers::write, nb::arg("given").none(),
           "Copies an int64 array of one number for each row, if all are from `low` to `high`; "
           "returns False, and copies nothing, for any other object.");
  nb::class_<EpisodeCounts>(m, "EpisodeCounts",
                            "The episodes of a batch: sums over the results of their steps.")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle>(),
           nb::arg("reward"), nb::arg("terminated"), nb::arg("truncated"), nb::arg("done"),
           nb::arg("episode_return"), nb::arg("episode_step"), nb::arg("sum"),
           "The arrays of one batch: float32 rewards and returns, bool flags, int64 steps and "
           "float64 sums, which keep returns in full precision.")
      .def("count_step", &EpisodeCounts::count_step,
           "Counts a step whose results are in the arrays; the first step of a batch is a reset.");
}

}  // namespace moolink::bind
