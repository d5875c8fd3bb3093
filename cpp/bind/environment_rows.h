#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <optional>

#include "bind/held_buffer.h"

namespace moolink::bind {

namespace nb = nanobind;

// Steps the environments of a worker one after the other, and writes what most steps give, an array
// that fits and no end of an episode, into shared memory. Python does the rest.
class EnvironmentRows {
 public:
  EnvironmentRows(nb::dict environments, nb::object observation, nb::handle reward,
                  nb::handle terminated, nb::handle truncated, nb::handle current,
                  bool keeps_infos);

  // Steps `actions.size()` rows from `first`. `take(row, result)` gets a result that is not plain,
  // `begin(row)` a row that is due to be reset.
  void step(std::size_t first, const nb::list& actions, nb::handle take, nb::handle begin);

 private:
  void step_row(std::size_t row, nb::handle action, nb::handle take, nb::handle begin);
  bool write_plain(std::size_t row, PyObject* result);
  bool write_observation(std::size_t row, PyObject* value);
  void write_reward(std::size_t row, double value);

  nb::dict environments_;
  std::optional<HeldBuffer> observation_;  // none if it is no single array
  nb::object array_type_;
  std::size_t observation_size_ = 0;  // bytes of one row
  HeldBuffer reward_;
  HeldBuffer terminated_;
  HeldBuffer truncated_;
  HeldBuffer current_;
  std::size_t rows_;
  bool keeps_infos_;
  int pid_;
  nb::object due_name_;
  nb::object env_name_;
  nb::object step_name_;
};

void bind_environment_rows(nb::module_& m);

}  // namespace moolink::bind
