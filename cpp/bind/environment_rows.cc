#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "base/at_fork.h"
#include "bind/bindings.h"
#include "bind/errors.h"
#include "bind/held_buffer.h"

namespace moolink::bind {

namespace nb = nanobind;

namespace {

bool is_true(PyObject* value) {
  const int truth = PyObject_IsTrue(value);
  if (truth < 0) throw nb::python_error();
  return truth != 0;
}

// Other workers' flags share the cache line: without a write, it stays in their caches.
void lower(bool& flag) {
  if (flag) flag = false;
}

// Steps the environments of a worker one after the other, and writes the results of most steps (an
// array that fits, no end of an episode) into shared memory. Python handles the others.
class EnvironmentRows {
 public:
  using Environments = nb::typed<nb::dict, std::size_t, nb::any>;

  EnvironmentRows(const Environments& environments, nb::object observation, nb::handle reward,
                  nb::handle terminated, nb::handle truncated, nb::handle current, bool keeps_infos)
      : reward_(reward, PyBUF_CONTIG | PyBUF_FORMAT),
        terminated_(terminated, PyBUF_CONTIG),
        truncated_(truncated, PyBUF_CONTIG),
        current_(current, PyBUF_CONTIG),
        rows_(static_cast<std::size_t>(reward_.view().len / reward_.view().itemsize)),
        keeps_infos_(keeps_infos),
        due_name_(interned("due")),
        env_name_(interned("env")),
        step_name_(interned("step")) {
    environments_.resize(rows_);
    for (const auto& [row, environment] : environments) {
      environments_.at(nb::cast<std::size_t>(row)) = nb::borrow(environment);
    }
    if (observation.is_none()) return;
    array_type_ = nb::borrow(observation.type());
    observation_.emplace(observation, PyBUF_CONTIG | PyBUF_FORMAT);
    observation_size_ = static_cast<std::size_t>(observation_->view().len) / rows_;
  }

  // Steps `actions.size()` rows from `first`. Calls `take(row, result)` with a result that is not
  // plain, `begin(row)` for a row that is due for a reset.
  void step(std::size_t first, const nb::typed<nb::list, nb::any>& actions, nb::handle take,
            nb::handle begin) {
    const std::size_t count = actions.size();
    if (first > rows_ || count > rows_ - first) throw nb::index_error("there are no such rows");
    for (std::size_t i = 0; i < count; ++i) {
      // The pool reads it when this process has died, or for a message. It orders no other memory.
      std::atomic_ref(*current_.data<std::uint64_t>())
          .store(first + i + 1, std::memory_order_relaxed);
      step_row(first + i, actions[i], take, begin);
    }
  }

 private:
  void step_row(std::size_t row, nb::handle action, nb::handle take, nb::handle begin) {
    const nb::object& environment = environments_[row];
    if (!environment.is_valid()) throw nb::index_error("this worker has no such row");
    if (is_true(nb::object(environment.attr(due_name_)).ptr())) {
      begin(row);
      return;
    }
    const nb::object env = environment.attr(env_name_);
    PyObject* arguments[] = {env.ptr(), action.ptr()};
    const nb::object result =
        own(PyObject_VectorcallMethod(step_name_.ptr(), arguments, 2, nullptr));
    if (forked_) environment.attr("end_forked_child")();
    if (!write_plain(row, result.ptr())) take(row, result);
  }

  // Whether all is done: false, with nothing written, if Python must handle the result.
  bool write_plain(std::size_t row, PyObject* result) {
    if (!PyTuple_CheckExact(result) || NB_TUPLE_GET_SIZE(result) != 5) return false;
    if (keeps_infos_) {
      PyObject* info = NB_TUPLE_GET_ITEM(result, 4);
      if (!PyDict_CheckExact(info) || NB_DICT_GET_SIZE(info) != 0) return false;
    }
    if (is_true(NB_TUPLE_GET_ITEM(result, 2)) || is_true(NB_TUPLE_GET_ITEM(result, 3))) {
      return false;
    }
    PyObject* reward = NB_TUPLE_GET_ITEM(result, 1);
    if (!PyNumber_Check(reward)) return false;
    const double value = PyFloat_AsDouble(reward);
    if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
    if (!write_observation(row, NB_TUPLE_GET_ITEM(result, 0))) return false;
    write_reward(row, value);
    lower(terminated_.data<bool>()[row]);
    lower(truncated_.data<bool>()[row]);
    return true;
  }

  // Copies an array with exactly the memory's shape and dtype; else returns false.
  bool write_observation(std::size_t row, PyObject* value) {
    if (!observation_ || reinterpret_cast<PyObject*>(Py_TYPE(value)) != array_type_.ptr()) {
      return false;
    }
    const std::byte* from =
        exact_memory(value, observation_->shape().subspan(1), observation_->view().format);
    if (from == nullptr) return false;
    std::memcpy(observation_->data<std::byte>() + row * observation_size_, from, observation_size_);
    return true;
  }

  void write_reward(std::size_t row, double value) {
    if (reward_.view().itemsize == sizeof(float)) {
      reward_.data<float>()[row] = static_cast<float>(value);
    } else {
      reward_.data<double>()[row] = value;
    }
  }

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

}  // namespace

void bind_environment_rows(nb::module_& m) {
  nb::class_<EnvironmentRows>(
      m, "EnvironmentRows",
      "The environments of a pool's worker, and the shared memory for the results of their steps.")
      .def(nb::init<const EnvironmentRows::Environments&, nb::object, nb::handle, nb::handle,
                    nb::handle, nb::handle, bool>(),
           nb::arg("environments"), nb::arg("observation").none(), nb::arg("reward"),
           nb::arg("terminated"), nb::arg("truncated"), nb::arg("current"), nb::arg("keeps_infos"),
           "`environments` are objects with `due` and `env`, by row. The arrays have all rows of "
           "the pool; `observation` is None if an observation is not a single array.")
      .def("step", &EnvironmentRows::step, nb::arg("first"), nb::arg("actions"), nb::arg("take"),
           nb::arg("begin"),
           "Steps the rows from `first`, one for each action. ``begin(row)`` is called for a row "
           "that is due, ``take(row, result)`` for every result except an array of the right kind "
           "within an episode. An exception of an environment ends the call; `current` is then its "
           "row + 1.");
}

}  // namespace moolink::bind
