#pragma once

// A pool's work on the arrays of one batch at each step: actions in, episodes counted.

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "bind/held_buffer.h"

namespace moolink::bind {

// The array for a batch's actions, which are int64 numbers.
class ActionNumbers {
 public:
  ActionNumbers(nb::handle room, std::int64_t low, std::int64_t high);

  // Copies an int64 array of one number for each row, if all are within the bounds. Returns false,
  // and copies nothing, for any other object.
  bool write(nb::handle given);

 private:
  HeldBuffer room_;
  std::int64_t low_;
  std::int64_t high_;
};

// The episodes of a batch: the totals of its steps' results.
class EpisodeCounts {
 public:
  EpisodeCounts(nb::handle reward, nb::handle terminated, nb::handle truncated, nb::handle done,
                nb::handle episode_return, nb::handle episode_step, nb::handle sum);

  // Counts a step whose results are in the arrays; a batch's first one is a reset.
  void count_step();

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

}  // namespace moolink::bind
