#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "base/at_fork.h"
#include "bind/held_buffer.h"

namespace moolink::bind {

namespace nb = nanobind;

// Tells, without a system call, whether this process is a fork of the one that made the object.
class ForkedSince final : public AtFork {
 public:
  ForkedSince() { join_forks(Rank::memory); }
  ~ForkedSince() { leave_forks(Rank::memory); }

  explicit operator bool() const { return forked_; }

 private:
  void before_fork() noexcept override {}
  void after_fork_in_parent() noexcept override {}
  void after_fork_in_child() noexcept override { forked_ = true; }

  bool forked_ = false;
};

// Steps the environments of a worker one after the other, and writes the results of most steps (an
// array that fits, no end of an episode) into shared memory. Python handles the others.
class EnvironmentRows {
 public:
  EnvironmentRows(const nb::dict& environments, nb::object observation, nb::handle reward,
                  nb::handle terminated, nb::handle truncated, nb::handle current,
                  bool keeps_infos);

  // Steps `actions.size()` rows from `first`. Calls `take(row, result)` with a result that is not
  // plain, `begin(row)` for a row that is due for a reset.
  void step(std::size_t first, const nb::list& actions, nb::handle take, nb::handle begin);

 private:
  void step_row(std::size_t row, nb::handle action, nb::handle take, nb::handle begin);
  bool write_plain(std::size_t row, PyObject* result);
  bool write_observation(std::size_t row, PyObject* value);
  void write_reward(std::size_t row, double value);

  std::vector<nb::object> environments_;   // by row; null for other workers' rows
  std::optional<HeldBuffer> observation_;  // none if it is not a single array
  nb::object array_type_;
  std::size_t observation_size_ = 0;  // bytes of one row
  HeldBuffer reward_;
  HeldBuffer terminated_;
  HeldBuffer truncated_;
  HeldBuffer current_;
  std::size_t rows_;
  bool keeps_infos_;
  ForkedSince forked_;
  nb::object due_name_;
  nb::object env_name_;
  nb::object step_name_;
};

}  // namespace moolink::bind
