#include "bind/context.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cmath>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "base/uid.h"
#include "bind/bindings.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/reference.h"
#include "bind/user_code.h"
#include "transport/tcp/interface.h"
#include "transport/tcp/openssl.h"
#include "transport/verbs/availability.h"

namespace moolink::bind {
namespace {

void log_to_python(LogLevel level, std::string_view message) {
  try {
    nb::module_::import_("moolink.internal.logs")
        .attr("logger")
        .attr("log")(static_cast<int>(level), "%s", text(message));
  } catch (nb::python_error& e) {
    e.discard_as_unraisable("moolink's log");
  }
}

constexpr milliseconds kCollectorWaits{50};
constexpr seconds kLongestClose{5};
constexpr double kLongestTimeout = 1e9;  // seconds; more means for ever

// A worker keeps one thread state for life: making one for each batch would cost a microsecond.
class Gil final : public runtime::Interpreter {
 public:
  void enter() override {
    if (state_ == nullptr) {
      release_ = PyGILState_Ensure();
      state_ = PyThreadState_Get();
    } else {
      survive_exit([] { PyEval_RestoreThread(state_); });
    }
    release_dropped();
  }

  void leave() override {
    release_dropped();
    PyEval_SaveThread();
  }

  void failed(const char* what) override {
    log_to_python(LogLevel::error, std::string("an internal error: ") + what);
  }

  void thread_ends() override {
    if (state_ == nullptr) return;
    PyEval_RestoreThread(state_);
    PyGILState_Release(release_);
    state_ = nullptr;
  }

 private:
  inline static thread_local PyThreadState* state_ = nullptr;
  inline static thread_local PyGILState_STATE release_{};
};

// The GIL guards all of it.
struct Defaults {
  std::shared_ptr<runtime::Context> context;
  std::vector<std::weak_ptr<runtime::RpcPeer>> peers;
  std::vector<std::shared_future<void>> closing;  // peers that workers close
  std::size_t workers = 0;
  bool shut_down = false;
};

// Never destroyed: its threads may still run at the end of the process.
Defaults& defaults() {
  static Defaults* const instance = new Defaults;
  return *instance;
}

// At the interpreter's exit, while Python still works: ends the threads, so that none outlives the
// interpreter.
void shut_down() {
  exiting = true;
  Defaults& state = defaults();
  state.shut_down = true;
  const auto context = std::exchange(state.context, nullptr);
  const auto peers = std::exchange(state.peers, {});
  const auto closing = std::exchange(state.closing, {});
  {
    const GilRelease unlocked;
    for (const auto& weak : peers) {
      if (const auto peer = weak.lock()) peer->close();
    }
    for (const auto& closed : closing) closed.wait_for(kLongestClose);
    if (context != nullptr && !context->abandoned()) context->stop();
  }
  release_dropped();
}

void set_max_threads(std::size_t count) {
  if (count == 0) throw Exception(ErrorCode::invalid_argument, "at least one thread is needed");
  Defaults& state = defaults();
  state.workers = count;
  if (state.context == nullptr) return;
  const auto lock = state.context->lock();
  state.context->workers().set_limit(count);
}

void call_later(double seconds, nb::typed<nb::callable, nb::object()> function) {
  if (is_shut_down()) return;  // the process ends, and its timers with it
  const auto context = default_context();
  const Time when = io::now() + to_duration(seconds);
  auto task = [function = Reference(std::move(function))] { call_back(function.borrow()); };
  const auto lock = context->lock();
  // The context owns the loop, so its timers end with it.
  context->engine().loop().at(when, [&workers = context->workers(), task = std::move(task)]()
                                        MOOLINK_LOCKED { workers.submit(task); });
  context->engine().rearm(when);
}

nb::str dump() {
  const Defaults& state = defaults();
  if (state.context == nullptr || state.context->abandoned()) {
    return nb::str("moolink is not in use in this process\n");
  }
  return nb::str(text(without_gil([context = state.context] { return context->dump(); })));
}

std::vector<std::string> host_addresses(const std::string& interface) {
  std::vector<std::string> hosts;
  for (const auto& address :
       transport::tcp::interface_addresses(transport::tcp::InterfaceChoice(interface))) {
    const std::string whole = address.text();
    hosts.push_back(whole.substr(whole.find("//") + 2, whole.rfind(':') - whole.find("//") - 2));
  }
  return hosts;
}

nb::dict openssl_info() {
  const transport::tcp::OpenSslFound& found = transport::tcp::find_openssl();
  nb::dict result;
  result["usable"] = found.functions != nullptr;
  result["version"] = text(found.version);
  result["where"] = text(found.where);
  result["reason"] = text(found.reason);
  return result;
}

nb::dict verbs_info() {
  const transport::verbs::Availability& found = transport::verbs::availability();
  nb::dict result;
  result["usable"] = found.usable;
  result["library"] = text(found.library);
  result["chosen"] = text(found.chosen);
  result["reason"] = text(found.reason);
  nb::list devices;
  for (const std::string& device : found.devices) devices.append(text(device));
  result["devices"] = devices;
  return result;
}

std::string host_key() { return default_context()->host_key().hex(); }

std::string create_uid() { return Uid::from_entropy().hex().substr(0, 16); }

}  // namespace

bool is_shut_down() { return defaults().shut_down; }

std::shared_ptr<runtime::Context> default_context() {
  park_if_exiting();
  Defaults& state = defaults();
  if (state.shut_down) {
    throw Exception(ErrorCode::closed, "the interpreter is shutting down");
  }
  if (state.context == nullptr || state.context->abandoned()) {
    state.peers.clear();
    state.context =
        runtime::Context::create({state.workers, std::make_shared<Gil>(), log_to_python, {}});
  }
  return state.context;
}

void log_info(std::string text) {
  const auto context = default_context();
  const auto lock = context->lock();
  context->log(LogLevel::info, std::move(text));
}

void close_at_exit(const std::shared_ptr<runtime::RpcPeer>& peer) {
  auto& peers = defaults().peers;
  std::erase_if(peers, [](const auto& weak) { return weak.expired(); });
  peers.push_back(peer);
}

void close_soon(const std::shared_ptr<runtime::RpcPeer>& peer) {
  if (exiting || peer->closed() || peer->context()->abandoned()) {
    return without_gil([&] { peer->close(); });
  }
  const auto promise = std::make_shared<std::promise<void>>();
  const std::shared_future<void> closed = promise->get_future().share();
  auto& closing = defaults().closing;
  std::erase_if(closing, [](const auto& one) {
    return one.wait_for(milliseconds(0)) == std::future_status::ready;
  });
  closing.push_back(closed);
  const GilRelease unlocked;
  {
    const auto lock = peer->context()->lock();
    peer->context()->workers().submit([peer, promise] {
      without_gil([&] { peer->close(); });
      promise->set_value();
    });
  }
  closed.wait_for(kCollectorWaits);
}

runtime::Engine::Interrupt signal_check() {
  if (gettid() != getpid()) return {};  // Python runs signal handlers on the main thread only
  return [] {
    const nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
}

Duration to_duration(double timeout) {
  if (std::isnan(timeout) || timeout < 0) {
    throw nb::value_error("a time limit must be a number of seconds, not negative");
  }
  const double bounded = std::min(timeout, kLongestTimeout);
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(bounded));
}

Time deadline_after(std::optional<double> timeout) {
  if (!timeout || *timeout > kLongestTimeout) return kNever;
  return io::now() + to_duration(*timeout);
}

void bind_context(nb::module_& m) {
  m.def("host_key", &host_key,
        "Returns a text that is the same in all processes that can reach this one over shared "
        "memory.");
  m.def("create_uid", &create_uid, "Returns a random string of 16 hexadecimal digits.");
  m.def("set_max_threads", &set_max_threads, nb::arg("count"),
        "Sets how many handlers and callbacks may run at once. Handlers that wait inside moolink "
        "do not count.");
  m.def("call_later", &call_later, nb::arg("seconds"), nb::arg("function"),
        "Calls `function()` on a worker thread after `seconds`.");
  nb::class_<LentSlot>(
      m, "LentSlot",
      "A context manager. A handler inside it does not count towards the limit of set_max_threads.")
      .def(nb::init<>())
      .def("__enter__", &LentSlot::enter)
      .def(
          "__exit__", [](LentSlot& self, const nb::args&) { self.exit(); },
          nb::sig(kExitSignature));
  m.def("dump", &dump,
        "Describes the state of this process as text: peers and their paths, waiting calls and "
        "running handlers with their age, groups and accumulators with the causes of their waits, "
        "threads that wait inside moolink, and the last 1,000 events. `moolink dump PID` shows the "
        "same for another process of this user.");
  m.def("host_addresses", &host_addresses, nb::arg("interface"),
        "Returns the addresses of a listener on every interface that `interface` allows, loopback "
        "first. `interface` has the form of MOOLINK_INTERFACE. Raises moolink.Error if it allows "
        "nothing but loopback, ValueError if it is malformed.");
  m.def("openssl_info", &openssl_info,
        "Returns the version and path of the OpenSSL that encrypts tcp, or the reason why there is "
        "none.",
        nb::sig("def openssl_info() -> moolink.reports.OpenSslInfo"));
  m.def("verbs_info", &verbs_info,
        "Returns the RDMA device, port and GID of this machine that the verbs transport uses, with "
        "all that were considered, or the reason why there is none. The first call looks for "
        "devices; if there is none, it loads no library.",
        nb::sig("def verbs_info() -> moolink.reports.VerbsInfo"));
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(shut_down));
}

}  // namespace moolink::bind
