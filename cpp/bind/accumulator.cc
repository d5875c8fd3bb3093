#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/enum_names.h"
#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/describe.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/group.h"
#include "bind/tensor.h"
#include "runtime/group/accumulator_peer.h"
#include "runtime/group/gradients.h"

namespace moolink::bind {
namespace {

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

// A state as one payload: its body holds both bodies, and the model's parts come first.
struct StateBodies {
  Buffer model;
  std::uint64_t model_parts = 0;
  Buffer rest;

  auto fields() { return std::tie(model, model_parts, rest); }
};

wire::Payload join(wire::Payload model, wire::Payload rest) {
  const StateBodies bodies{model.body, model.parts.size(), rest.body};
  wire::Payload state{wire::encode(bodies), std::move(model.parts)};
  std::ranges::move(rest.parts, std::back_inserter(state.parts));
  return state;
}

// The model's parts count as lent: this peer may hand the snapshot on to others.
std::pair<wire::Payload, wire::Payload> split(const wire::Payload& state) {
  const auto bodies = wire::decode<StateBodies>(state.body);
  if (bodies.model_parts > state.parts.size()) wire::fail("a state without its model");
  const auto rest = state.parts.begin() + static_cast<std::ptrdiff_t>(bodies.model_parts);
  wire::Payload model{bodies.model, {state.parts.begin(), rest}};
  for (std::uint32_t part = 0; part < model.parts.size(); ++part) model.lent.push_back({part});
  wire::Payload others{bodies.rest, {rest, state.parts.end()}};
  return {std::move(model), std::move(others)};
}

nb::object integer(const accumulate::CounterSum& sum) {
  if (sum.fits_64_bits()) return nb::int_(static_cast<std::int64_t>(sum.low));
  return (nb::int_(sum.high) << nb::int_(64)) | nb::int_(sum.low);
}

// The core of moolink's accumulators: flat buckets in, flat results out.
class PyAccumulator : public runtime::AccumulatorPeer {
 public:
  using Sections = std::vector<std::pair<std::string, std::uint64_t>>;

  PyAccumulator(const PyGroup& group, const std::string& name, const Sections& sections,
                const std::string& layout, bool observer)
      : AccumulatorPeer(group.group(), options_of(name, sections, layout, observer)),
        values_(group.options()) {
    values_.device = {};  // optimisers place each part of their state themselves
  }
  ~PyAccumulator() override { close_without_gil(); }

  bool wait(double timeout) {
    return wait_unlocked(timeout, [this](Time deadline, const auto& interrupt) {
      return AccumulatorPeer::wait(deadline, interrupt);
    });
  }

  // Pieces: (a gradient without gaps or None, elements, offset in the bucket).
  using Pieces = std::vector<std::tuple<nb::object, std::uint64_t, std::uint64_t>>;
  bool gather(const std::string& dtype_name, const Pieces& pieces, double factor, bool clear) {
    const tensor::DType dtype = dtype_named(dtype_name);
    const std::uint64_t item = tensor::item_size(dtype);
    std::vector<runtime::Gradient> gradients;
    // The pieces keep the memory: other threads may replace a gradient or its storage.
    std::vector<ImportedTensor> imported;
    imported.reserve(pieces.size());
    for (const auto& [gradient, count, offset] : pieces) {
      const std::uint64_t size = bucket_bytes();
      if (offset > size || count > (size - offset) / item) {
        throw Exception(ErrorCode::invalid_argument, "a gradient does not fit into the bucket");
      }
      if (gradient.is_none()) {
        gradients.push_back({nullptr, count, offset});
        continue;
      }
      imported.push_back(import_numbers(gradient));
      require_piece(imported.back(), dtype, count, clear);
      gradients.push_back({imported.back().tensor.data, count, offset});
    }
    const GilRelease unlocked;
    return runtime::gather(dtype, gradients, factor, clear, AccumulatorPeer::bucket().span());
  }

  // The bucket of the next contribution. gather() does not copy gradients that lie in it already.
  nb::object bucket_array() {
    return export_bytes(without_gil([this] { return AccumulatorPeer::bucket(); }));
  }

  nb::object take_array() {
    const MutableBuffer result = without_gil([this] { return AccumulatorPeer::take_result(); });
    return result.empty() ? nb::none() : export_bytes(result);
  }

  double norm(const Bytes& result) {
    check_size(result);
    const GilRelease unlocked;
    return runtime::norm(layout(),
                         {reinterpret_cast<const std::byte*>(result.data()), result.size()});
  }

  void scale(const Bytes& result, double factor) {
    check_size(result);
    const GilRelease unlocked;
    runtime::scale(layout(), factor, {reinterpret_cast<std::byte*>(result.data()), result.size()});
  }

  void set_state(nb::handle model, nb::handle rest) {
    wire::Payload first = encode_value(model, values_, transient());
    wire::Payload second = encode_value(rest, values_, transient());
    const Limits& limits = values_.limits;
    if (first.parts.size() + second.parts.size() > limits.max_parts ||
        first.bytes() + second.bytes() > limits.max_message) {
      throw Exception(ErrorCode::invalid_argument,
                      "the state's arrays exceed the limit of " + std::to_string(limits.max_parts) +
                          " arrays and " + std::to_string(limits.max_message) + " bytes");
    }
    const GilRelease unlocked;
    AccumulatorPeer::set_state(join(std::move(first), std::move(second)));
  }

  nb::object new_values() {
    const auto state = without_gil([this] { return AccumulatorPeer::new_state(); });
    if (!state) return nb::none();
    try {
      const auto [model, rest] = split(state->state);
      ValueOptions reading = values_;
      reading.reads_only = true;
      reading.copies = nullptr;  // installing copies in any case
      // The user may write to the rest, so it is copied.
      return nb::make_tuple(state->number, decode_value(model, reading),
                            decode_value(wire::private_copy(rest, transient()), values_));
    } catch (...) {
      const GilRelease unlocked;
      refuse_state(state->number);
      throw;
    }
  }

  nb::dict stats_dict() {
    const auto stats = without_gil([this] { return AccumulatorPeer::stats(); });
    nb::dict counters;
    for (const auto& [name, sum] : stats.record.counters) counters[name.c_str()] = integer(sum);
    nb::list lost;
    for (const accumulate::Contribution& contribution : stats.lost) {
      lost.append(nb::make_tuple(contribution.name, contribution.k));
    }
    nb::dict result;
    result["batch_size"] = stats.record.total;
    result["num_gradients"] = stats.staleness.size();
    result["num_skipped"] = stats.record.contributions.size() - stats.staleness.size();
    result["contributors"] = stats.contributors;
    result["contributions"] = stats.contributions;
    result["staleness"] = stats.staleness;
    result["counters"] = counters;
    result["waiting_for"] = stats.waiting_for;
    result["lost"] = lost;
    result["phase_seconds"] = bind::describe(stats.phases);
    return result;
  }

  // (seconds since the user's last call, or 0 while the user waits in one; seconds without news;
  // what is waited for)
  nb::typed<nb::tuple, double, double, nb::str> activity_tuple() {
    const auto activity = without_gil([this] { return AccumulatorPeer::activity(); });
    return nb::make_tuple(in_seconds_of(activity.idle), in_seconds_of(activity.still),
                          text(activity.awaited));
  }

  void close_without_gil() {
    const GilRelease unlocked;
    AccumulatorPeer::close();
  }

 private:
  static Options options_of(const std::string& name, const Sections& sections,
                            const std::string& layout, bool observer) {
    Options options;
    options.name = name;
    options.layout = layout;
    options.role = observer ? group::Role::observer : group::Role::member;
    for (const auto& [dtype_name, count] : sections) {
      const auto dtype = tensor::dtype_from_name(dtype_name);
      if (!dtype || !runtime::are_averaged(*dtype)) {
        throw Exception(ErrorCode::invalid_argument,
                        "gradients of type " + dtype_name + " cannot be averaged");
      }
      options.sections.push_back({*dtype, count});
    }
    return options;
  }
  static void require_piece(const ImportedTensor& given, tensor::DType dtype, std::uint64_t count,
                            bool clear) {
    const tensor::TensorRef& tensor = given.tensor;
    if (tensor.dtype != dtype || tensor::element_count(tensor.shape) != count ||
        !tensor.is_contiguous() || (clear && tensor.read_only)) {
      throw Exception(ErrorCode::invalid_argument,
                      "a gradient is " + tensor::layout_text(tensor.dtype, tensor.shape) +
                          " now, has gaps or cannot be zeroed, and " + std::to_string(count) +
                          " elements of " + std::string(tensor::dtype_name(dtype)) +
                          " without gaps are needed: do not change gradients meanwhile");
    }
  }
  // For snapshots, which are as large as the model and used once.
  Allocator& transient() { return group()->rpc()->context()->transient(); }
  void check_size(const Bytes& result) const {
    if (layout().sections_in(result.size()) > 0) return;
    throw Exception(ErrorCode::invalid_argument,
                    "a result has " + std::to_string(bucket_bytes()) +
                        " bytes, or those of its first sections, not " +
                        std::to_string(result.size()));
  }

  ValueOptions values_;
};

using Peer = runtime::AccumulatorPeer;

Peer::OnDivergence divergence_from_name(const std::string& name) {
  return value_named(enum_names<Peer::OnDivergence::resync>("raise", "warn", "resync"), name,
                     "on_divergence is 'raise', 'warn' or 'resync', not '", "'");
}

// The state as of the last update().
void bind_seen(nb::class_<PyAccumulator>& bound) {
  bound
      .def("connected", &Peer::connected,
           "Whether this peer is an active member and has the group's model.")
      .def("wants_state", &Peer::wants_state, "Whether set_state() is to be called.")
      .def("state_overdue", &Peer::state_overdue, "Whether a state has been wanted for 5 s.")
      .def("has_new_state", &Peer::has_new_state, "Whether new_state() has a state.")
      .def("wants_gradients", &Peer::wants_gradients, "Whether offer() may be called.")
      .def("has_result", &Peer::has_result, "Whether take_result() has a result.")
      .def("model_version", &Peer::model_version,
           "Returns the model's version: the number of rounds that were delivered to it.")
      .def("is_everywhere", &Peer::is_everywhere,
           "Whether every member has the round that led to this model's version.")
      .def("leader", &Peer::leader, "Returns the name of the leader; \"\": there is none.")
      .def("is_leader", &Peer::is_leader, "Whether this peer leads.");
}

void bind_settings(nb::class_<PyAccumulator>& bound) {
  const nb::call_guard<GilRelease> unlocked;
  bound
      .def("set_awaited", &Peer::set_awaited, nb::arg("text"), unlocked,
           "Sets the cause of this peer's wait for the log; \"\": the cause is the core's own.")
      .def("set_model_version", &Peer::set_model_version, nb::arg("version"), unlocked,
           "Sets the version of a model from a checkpoint; raises ValueError if the group has "
           "begun at another version.")
      .def("set_virtual_batch_size", &Peer::set_virtual_batch_size, nb::arg("size"), unlocked,
           "Sets the sum of batch sizes that completes a round.")
      .def("set_parallel_gradients", &Peer::set_parallel_gradients, nb::arg("rounds"), unlocked,
           "Sets how many rounds, 1 to 256, may be under way at once.");
}

void bind_states(nb::class_<PyAccumulator>& bound) {
  const nb::call_guard<GilRelease> unlocked;
  bound
      .def("set_state", &PyAccumulator::set_state, nb::arg("model"), nb::arg("rest"),
           "Gives the snapshot for newcomers; its arrays are copied before this returns. Raises "
           "RuntimeError if none is wanted.")
      .def(
          "new_state", &PyAccumulator::new_values,
          "Returns the number, the model and the rest of the snapshot that has arrived; None if it "
          "was given up meanwhile. The caller must not write to the model's arrays.",
          nb::sig("def new_state(self) -> tuple[int, typing.Any, typing.Any] | None"))
      .def("state_installed", &Peer::state_installed, nb::arg("number"), unlocked,
           "Reports that the snapshot of this number is now the model.")
      .def("refuse_state", &Peer::refuse_state, nb::arg("number"), unlocked,
           "Reports that the snapshot of this number cannot be used; this peer asks for another "
           "one later.");
}

void bind_rounds(nb::class_<PyAccumulator>& bound) {
  const nb::call_guard<GilRelease> unlocked;
  bound
      .def("gather", &PyAccumulator::gather, nb::arg("dtype"), nb::arg("pieces"), nb::arg("factor"),
           nb::arg("clear"),
           "Writes gradients x `factor` into the bucket and, if `clear`, zeroes the gradients "
           "outside it. `pieces`: (a gradient without gaps in host memory, or None for zeros; "
           "elements; offset in the bucket in bytes). Returns whether all elements are finite.")
      .def("bucket", &PyAccumulator::bucket_array,
           "The bytes of the next contribution's bucket. gather() scales gradients that lie at "
           "their places in it without a copy. offer() lends the memory to the other members.",
           nb::sig("def bucket(self) -> numpy.typing.NDArray[numpy.uint8]"))
      .def("offer", &Peer::offer, nb::arg("batch_size"), nb::arg("counters"), unlocked,
           "Contributes the bucket, weighted by `batch_size`; 0: the counters alone.")
      .def("offer_unwritten", &Peer::offer_unwritten, nb::arg("batch_size"), nb::arg("counters"),
           unlocked,
           "Contributes the bucket while it is still being filled, from its beginning. written() "
           "reports how much is filled; withdraw() gives up the rest.")
      .def("written", &Peer::written, nb::arg("bytes"), unlocked,
           "Reports that the first `bytes` bytes of the bucket are filled; the other members read "
           "them from now on. The last byte ends the contribution.")
      .def("withdraw", &Peer::withdraw, unlocked,
           "Gives up a contribution whose bucket is not filled; its round begins again without it.")
      .def("why_not_wanted", &Peer::why_not_wanted, unlocked,
           "Returns a sentence on why wants_gradients() is false.")
      .def("take_result", &PyAccumulator::take_array,
           "Returns the mean of the next round as the bytes of a bucket, in memory that is the "
           "caller's; None: there is none, or it was already taken.",
           nb::sig("def take_result(self) -> numpy.typing.NDArray[numpy.uint8] | None"))
      .def("norm", &PyAccumulator::norm, nb::arg("result"),
           "Returns the L2 norm of a result, or of its first sections.",
           nb::sig("def norm(self, result: numpy.typing.NDArray[numpy.uint8]) -> float"))
      .def("scale", &PyAccumulator::scale, nb::arg("result"), nb::arg("factor"),
           "Multiplies a result, or its first sections, by `factor` in place.",
           nb::sig("def scale(self, result: numpy.typing.NDArray[numpy.uint8], factor: float) -> "
                   "None"))
      .def("release_result", &Peer::release_result, unlocked,
           "Reports that the result was applied, which makes room for the next round.")
      .def("checksum", &Peer::checksum, nb::arg("round"), nb::arg("value"), unlocked,
           "Reports the checksum of the parameters after a round, which the leader compares.")
      .def("stats", &PyAccumulator::stats_dict,
           "Returns the statistics of the round that was taken last.",
           nb::sig("def stats(self) -> moolink.reports.GradientStats"))
      .def("activity", &PyAccumulator::activity_tuple,
           "Returns the seconds since the user's last call (0 while the user waits in one), the "
           "seconds since the user last got or supplied anything, and the cause of the "
           "accumulator's wait.");
}

}  // namespace

void bind_accumulator(nb::module_& m) {
  nb::class_<PyAccumulator> bound(
      m, "AccumulatorCore",
      "The base of moolink's accumulators: it takes flat buckets and returns flat results.");
  bound
      .def(nb::init<const PyGroup&, const std::string&, const PyAccumulator::Sections&,
                    const std::string&, bool>(),
           nb::arg("group"), nb::arg("name"), nb::arg("sections"), nb::arg("layout"),
           nb::arg("observer"))
      .def(
          "update",
          [](PyAccumulator& self, const std::string& on_divergence) {
            self.update(divergence_from_name(on_divergence));
          },
          nb::arg("on_divergence"), nb::call_guard<GilRelease>(),
          "Takes over the events so far. Raises the error that keeps this peer out. If this peer's "
          "parameters differ from the leader's, `on_divergence` decides: \"raise\", \"warn\", or "
          "\"resync\", which asks for the leader's state.")
      .def("wait", &PyAccumulator::wait, nb::arg("timeout"),
           "Waits for at most `timeout` seconds; returns whether update() may have something new.")
      .def("close", &PyAccumulator::close_without_gil, "Ends this peer's part in the rounds.");
  bind_seen(bound);
  bind_settings(bound);
  bind_states(bound);
  bind_rounds(bound);
}

}  // namespace moolink::bind
