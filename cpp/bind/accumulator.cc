#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

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

// The core of moolink's accumulators: flat buckets in, flat results out.
class PyAccumulator {
 public:
  PyAccumulator(const PyGroup& group, const std::string& name,
                const std::vector<std::pair<std::string, std::uint64_t>>& sections,
                const std::string& layout, bool observer)
      : options_(group.options()) {
    // Optimisers place each part of their state themselves.
    options_.device = {};
    runtime::AccumulatorPeer::Options options;
    options.name = name;
    options.layout = layout;
    options.role = observer ? group::Role::observer : group::Role::member;
    for (const auto& [dtype_name, count] : sections) {
      const auto dtype = tensor::dtype_from_name(dtype_name);
      if (!dtype || !collective::is_supported(*dtype, collective::ReduceOp::mean)) {
        throw Exception(ErrorCode::invalid_argument,
                        "gradients of type " + dtype_name + " cannot be averaged");
      }
      options.sections.push_back({*dtype, count});
    }
    peer_ = std::make_unique<runtime::AccumulatorPeer>(group.group(), std::move(options));
  }
  ~PyAccumulator() { close(); }
  PyAccumulator(const PyAccumulator&) = delete;
  PyAccumulator& operator=(const PyAccumulator&) = delete;

  bool wait(double timeout) {
    const Time deadline = deadline_after(timeout);
    const auto interrupt = signal_check();
    const GilRelease unlocked;
    return peer_->wait(deadline, interrupt);
  }

  // Pieces: (address of a gradient without gaps or 0, elements, offset in the bucket).
  using Pieces = std::vector<std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t>>;
  bool gather(const std::string& dtype_name, const Pieces& pieces, double factor, bool clear) {
    const auto dtype = tensor::dtype_from_name(dtype_name);
    if (!dtype) throw Exception(ErrorCode::invalid_argument, "no element type " + dtype_name);
    const std::uint64_t item = tensor::item_size(*dtype);
    std::vector<runtime::Gradient> gradients;
    for (const auto& [address, count, offset] : pieces) {
      const std::uint64_t size = peer_->bucket_bytes();
      if (offset > size || count > (size - offset) / item) {
        throw Exception(ErrorCode::invalid_argument, "a gradient does not fit into the bucket");
      }
      gradients.push_back({reinterpret_cast<std::byte*>(address), count, offset});
    }
    const GilRelease unlocked;
    return runtime::gather(*dtype, gradients, factor, clear, peer_->bucket().span());
  }

  // The bucket of the next contribution. gather() does not copy gradients that lie in it already.
  nb::object bucket() {
    return export_bytes(without_gil([this] { return peer_->bucket(); }));
  }

  nb::object take_result() {
    const MutableBuffer result = without_gil([this] { return peer_->take_result(); });
    if (result.empty()) return nb::none();
    return export_bytes(result);
  }

  double norm(const Bytes& result) {
    check_size(result);
    const GilRelease unlocked;
    return runtime::norm(peer_->layout(), reinterpret_cast<const std::byte*>(result.data()));
  }

  void scale(const Bytes& result, double factor) {
    check_size(result);
    const GilRelease unlocked;
    runtime::scale(peer_->layout(), factor, reinterpret_cast<std::byte*>(result.data()));
  }

  void set_state(nb::handle state) {
    wire::Payload payload = encode_value(state, options_, transient());
    const GilRelease unlocked;
    peer_->set_state(std::move(payload));
  }

  nb::object new_state() {
    const auto state = without_gil([this] { return peer_->new_state(); });
    if (!state) return nb::none();
    // This peer may hand the snapshot on to others.
    const auto own = wire::private_copy(state->state, transient());
    try {
      return nb::make_tuple(state->number, decode_value(own, options_));
    } catch (...) {
      const GilRelease unlocked;
      peer_->refuse_state(state->number);
      throw;
    }
  }

  nb::dict stats() {
    const auto stats = without_gil([this] { return peer_->stats(); });
    nb::dict counters;
    for (const auto& [name, value] : stats.record.counters) counters[name.c_str()] = value;
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
    result["phase_seconds"] = describe(stats.phases);
    return result;
  }

  // (seconds since the user's last call, or 0 while the user waits in one; seconds without news;
  // what is waited for)
  nb::tuple activity() {
    const auto activity = without_gil([this] { return peer_->activity(); });
    return nb::make_tuple(in_seconds_of(activity.idle), in_seconds_of(activity.still),
                          text(activity.awaited));
  }

  void close() {
    const GilRelease unlocked;
    peer_->close();
  }

  runtime::AccumulatorPeer& peer() { return *peer_; }

 private:
  // For snapshots, which are as large as the model and used once.
  Allocator& transient() { return peer_->group()->rpc()->context()->transient(); }
  void check_size(const Bytes& result) const {
    if (result.size() == peer_->bucket_bytes()) return;
    throw Exception(ErrorCode::invalid_argument,
                    "a result has " + std::to_string(peer_->bucket_bytes()) + " bytes, not " +
                        std::to_string(result.size()));
  }

  ValueOptions options_;
  std::unique_ptr<runtime::AccumulatorPeer> peer_;
};

using Peer = runtime::AccumulatorPeer;

Peer::OnDivergence divergence_from_name(const std::string& name) {
  if (name == "raise") return Peer::OnDivergence::raise;
  if (name == "warn") return Peer::OnDivergence::warn;
  if (name == "resync") return Peer::OnDivergence::resync;
  throw Exception(ErrorCode::invalid_argument,
                  "on_divergence is 'raise', 'warn' or 'resync', not '" + name + "'");
}

// A method of the peer.
template <class Result, class... Args>
auto forward(Result (Peer::*method)(Args...)) {
  return [method](PyAccumulator& self, Args... args) { return (self.peer().*method)(args...); };
}
template <class Result>
auto forward(Result (Peer::*method)() const) {
  return [method](PyAccumulator& self) -> std::decay_t<Result> { return (self.peer().*method)(); };
}

// The state as of the last update().
void bind_seen(nb::class_<PyAccumulator>& bound) {
  bound
      .def("connected", forward(&Peer::connected),
           "Whether this peer is an active member and has the group's model.")
      .def("wants_state", forward(&Peer::wants_state), "Whether set_state() is to be called.")
      .def("state_overdue", forward(&Peer::state_overdue),
           "Whether a state has been wanted for 5 s.")
      .def("has_new_state", forward(&Peer::has_new_state), "Whether new_state() has a state.")
      .def("wants_gradients", forward(&Peer::wants_gradients), "Whether offer() may be called.")
      .def("has_result", forward(&Peer::has_result), "Whether take_result() has a result.")
      .def("model_version", forward(&Peer::model_version),
           "Returns the model's version: the number of rounds that were delivered to it.")
      .def("is_everywhere", forward(&Peer::is_everywhere),
           "Whether every member has the round that led to this model's version.")
      .def("leader", forward(&Peer::leader), "Returns the name of the leader; \"\": there is none.")
      .def("is_leader", forward(&Peer::is_leader), "Whether this peer leads.");
}

void bind_settings(nb::class_<PyAccumulator>& bound) {
  const nb::call_guard<GilRelease> unlocked;
  bound
      .def("set_awaited", forward(&Peer::set_awaited), nb::arg("text"), unlocked,
           "Sets the cause of this peer's wait for the log; \"\": the cause is the core's own.")
      .def("set_model_version", forward(&Peer::set_model_version), nb::arg("version"), unlocked,
           "Sets the version of a model from a checkpoint; raises ValueError if the group has "
           "begun at another version.")
      .def("set_virtual_batch_size", forward(&Peer::set_virtual_batch_size), nb::arg("size"),
           unlocked, "Sets the sum of batch sizes that completes a round.")
      .def("set_parallel_gradients", forward(&Peer::set_parallel_gradients), nb::arg("rounds"),
           unlocked, "Sets how many rounds, 1 to 256, may be under way at once.");
}

void bind_states(nb::class_<PyAccumulator>& bound) {
  const nb::call_guard<GilRelease> unlocked;
  bound
      .def("set_state", &PyAccumulator::set_state, nb::arg("state"),
           "Gives the snapshot for newcomers; its arrays are copied before this returns. Raises "
           "RuntimeError if none is wanted.",
           nb::sig("def set_state(self, state: typing.Any) -> None"))
      .def("new_state", &PyAccumulator::new_state,
           "The snapshot that has arrived, with its number; None: it was given up meanwhile.",
           nb::sig("def new_state(self) -> tuple[int, typing.Any] | None"))
      .def("state_installed", forward(&Peer::state_installed), nb::arg("number"), unlocked,
           "Reports that the snapshot of this number is now the model.")
      .def("refuse_state", forward(&Peer::refuse_state), nb::arg("number"), unlocked,
           "Reports that the snapshot of this number cannot be used; this peer asks for another "
           "one later.");
}

void bind_rounds(nb::class_<PyAccumulator>& bound) {
  const nb::call_guard<GilRelease> unlocked;
  bound
      .def("gather", &PyAccumulator::gather, nb::arg("dtype"), nb::arg("pieces"), nb::arg("factor"),
           nb::arg("clear"),
           "Writes gradients x `factor` into the bucket and, if `clear`, zeroes the gradients "
           "outside it. `pieces`: (address of a gradient without gaps, or 0 for zeros; elements; "
           "offset in the bucket in bytes). Returns whether all elements are finite.")
      .def("bucket", &PyAccumulator::bucket,
           "The bytes of the next contribution's bucket. gather() scales gradients that lie at "
           "their places in it without a copy. offer() lends the memory to the other members.",
           nb::sig("def bucket(self) -> numpy.typing.NDArray[numpy.uint8]"))
      .def("offer", forward(&Peer::offer), nb::arg("batch_size"), nb::arg("counters"), unlocked,
           "Contributes the bucket, weighted by `batch_size`; 0: the counters alone.",
           nb::sig("def offer(self, batch_size: int, counters: dict[str, int]) -> None"))
      .def("offer_unwritten", forward(&Peer::offer_unwritten), nb::arg("batch_size"),
           nb::arg("counters"), unlocked,
           "Contributes the bucket while it is still being filled, from its beginning. written() "
           "reports how much is filled; withdraw() gives up the rest.",
           nb::sig("def offer_unwritten(self, batch_size: int, counters: dict[str, int]) -> None"))
      .def("written", forward(&Peer::written), nb::arg("bytes"), unlocked,
           "Reports that the first `bytes` bytes of the bucket are filled; the other members read "
           "them from now on. The last byte ends the contribution.")
      .def("withdraw", forward(&Peer::withdraw), unlocked,
           "Gives up a contribution whose bucket is not filled; its round begins again without it.")
      .def("why_not_wanted", forward(&Peer::why_not_wanted), unlocked,
           "Returns a sentence on why wants_gradients() is false.")
      .def("take_result", &PyAccumulator::take_result,
           "Returns the mean of the next round as the bytes of a bucket, in memory that is the "
           "caller's; None: there is none, or it was already taken.",
           nb::sig("def take_result(self) -> numpy.typing.NDArray[numpy.uint8] | None"))
      .def("norm", &PyAccumulator::norm, nb::arg("result"), "Returns the L2 norm of a result.",
           nb::sig("def norm(self, result: numpy.typing.NDArray[numpy.uint8]) -> float"))
      .def("scale", &PyAccumulator::scale, nb::arg("result"), nb::arg("factor"),
           "Multiplies a result by `factor` in place.",
           nb::sig("def scale(self, result: numpy.typing.NDArray[numpy.uint8], factor: float) -> "
                   "None"))
      .def("release_result", forward(&Peer::release_result), unlocked,
           "Reports that the result was applied, which makes room for the next round.")
      .def("checksum", forward(&Peer::checksum), nb::arg("round"), nb::arg("value"), unlocked,
           "Reports the checksum of the parameters after a round, which the leader compares.")
      .def("stats", &PyAccumulator::stats,
           "Returns the statistics of the round that was taken last.",
           nb::sig("def stats(self) -> moolink.reports.GradientStats"))
      .def("activity", &PyAccumulator::activity,
           nb::sig("def activity(self) -> tuple[float, float, str]"),
           "Returns the seconds since the user's last call (0 while the user waits in one), the "
           "seconds since the user last got or supplied anything, and the cause of the "
           "accumulator's wait.");
}

}  // namespace

void bind_accumulator(nb::module_& m) {
  using Sections = std::vector<std::pair<std::string, std::uint64_t>>;
  nb::class_<PyAccumulator> bound(
      m, "AccumulatorCore",
      "The base of moolink's accumulators: it takes flat buckets and returns flat results.");
  bound
      .def(
          nb::init<const PyGroup&, const std::string&, const Sections&, const std::string&, bool>(),
          nb::arg("group"), nb::arg("name"), nb::arg("sections"), nb::arg("layout"),
          nb::arg("observer"),
          nb::sig(
              "def __init__(self, group: GroupCore, name: str, sections: list[tuple[str, int]], "
              "layout: str, observer: bool) -> None"))
      .def(
          "update",
          [](PyAccumulator& self, const std::string& on_divergence) {
            self.peer().update(divergence_from_name(on_divergence));
          },
          nb::arg("on_divergence"), nb::call_guard<GilRelease>(),
          "Takes over the events so far. Raises the error that keeps this peer out. If this peer's "
          "parameters differ from the leader's, `on_divergence` decides: \"raise\", \"warn\", or "
          "\"resync\", which asks for the leader's state.")
      .def("wait", &PyAccumulator::wait, nb::arg("timeout"),
           "Waits for at most `timeout` seconds; returns whether update() may have something new.")
      .def("close", &PyAccumulator::close, "Ends this peer's part in the rounds.");
  bind_seen(bound);
  bind_settings(bound);
  bind_states(bound);
  bind_rounds(bound);
}

}  // namespace moolink::bind
