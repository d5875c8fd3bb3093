// Peers over a real RDMA device, soft-RoCE among them, that fails under them, with tcp beside it or
// without: tests/nightly/verbs brings these where there is one. What the device tells comes from
// the test.

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"
#include "device/fake_cuda.h"
#include "rpc/addresses.h"
#include "runtime/peer/rpc_peer.h"
#include "transport/fake_dmabuf.h"
#include "transport/verbs/availability.h"
#include "transport/verbs/library.h"

namespace moolink::runtime {
namespace verbs_peers_test {

using transport::verbs::Library;
using wire::PathKind;

constexpr Duration kCallTimeout = seconds(60);
constexpr int kFailures = 4;
constexpr std::size_t kLargest = 3'000'000;
constexpr std::size_t kSizes[] = {100, 70'000, kLargest};  // of the arguments, by turns

// Takes the place of functions of the library: the events of a device that is in use are those that
// the test makes, on a descriptor of the test's.
class FailingDevices {
 public:
  FailingDevices()
      : table_(const_cast<Library&>(*transport::verbs::load_library().functions)), real_(table_) {
    current_ = this;
    table_.open_device = [](ibv_device* device) { return current_->open(device); };
    table_.close_device = [](ibv_context* context) { return current_->close(context); };
    table_.create_srq = [](ibv_pd* domain, ibv_srq_init_attr* attributes) {
      return current_->create_srq(domain, attributes);
    };
    table_.create_cq = [](ibv_context* context, int entries, void* of, ibv_comp_channel* channel,
                          int vector) {
      const AsTheLibrarys own(*current_, context);
      return current_->real_.create_cq(context, entries, of, channel, vector);
    };
    table_.create_qp = [](ibv_pd* domain, ibv_qp_init_attr* attributes) {
      const AsTheLibrarys own(*current_, domain->context);
      return current_->real_.create_qp(domain, attributes);
    };
    table_.reg_dmabuf_mr = transport::verbs::register_mapped;
    table_.get_async_event = take_event;
    table_.ack_async_event = [](ibv_async_event*) {};
  }
  ~FailingDevices() { table_ = real_; }
  FailingDevices(const FailingDevices&) = delete;
  FailingDevices& operator=(const FailingDevices&) = delete;

  // The device that has been in use for the longest, or the shortest, time tells that it has
  // failed; the next so many times it cannot be opened.
  void fail(bool newest, int refusals) {
    const std::lock_guard lock(mutex_);
    refusals_ = refusals;
    const std::uint64_t one = 1;
    const int descriptor = newest ? used_.back()->async_fd : used_.front()->async_fd;
    CHECK_EQ(::write(descriptor, &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }
  // From now on it can be opened.
  void come_back() {
    const std::lock_guard lock(mutex_);
    refusals_ = 0;
  }
  int opened() const { return opened_; }
  int refused() const { return refused_; }

 private:
  // While the system makes something that tells of its events through the library's descriptor.
  class AsTheLibrarys {
   public:
    AsTheLibrarys(FailingDevices& devices, ibv_context* context)
        : lock_(devices.mutex_), context_(context), others_(devices.descriptors_.at(context)) {
      std::swap(context_->async_fd, others_);
    }
    ~AsTheLibrarys() { std::swap(context_->async_fd, others_); }
    AsTheLibrarys(const AsTheLibrarys&) = delete;
    AsTheLibrarys& operator=(const AsTheLibrarys&) = delete;

   private:
    const std::lock_guard<std::mutex> lock_;
    ibv_context* context_;
    int& others_;
  };

  ibv_context* open(ibv_device* device) {
    const std::lock_guard lock(mutex_);
    if (refusals_ == 0) return real_.open_device(device);
    --refusals_;
    ++refused_;
    errno = ENODEV;
    return nullptr;
  }
  // The last thing that is made before the events are watched.
  ibv_srq* create_srq(ibv_pd* domain, ibv_srq_init_attr* attributes) {
    const std::lock_guard lock(mutex_);
    ibv_srq* queue = real_.create_srq(domain, attributes);
    ibv_context* context = domain->context;
    descriptors_[context] =
        std::exchange(context->async_fd, ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    used_.push_back(context);
    ++opened_;
    return queue;
  }
  int close(ibv_context* context) {
    const std::lock_guard lock(mutex_);
    const auto found = descriptors_.find(context);
    if (found != descriptors_.end()) {
      ::close(std::exchange(context->async_fd, found->second));
      descriptors_.erase(found);
      used_.remove(context);
    }
    return real_.close_device(context);
  }
  static int take_event(ibv_context* context, ibv_async_event* event) {
    std::uint64_t count = 0;
    if (::read(context->async_fd, &count, sizeof count) != sizeof count) return -1;
    *event = {};
    event->event_type = IBV_EVENT_DEVICE_FATAL;
    return 0;
  }

  static inline FailingDevices* current_ = nullptr;  // the library's functions know no "this"

  Library& table_;
  const Library real_;
  std::mutex mutex_;
  std::list<ibv_context*> used_;
  std::map<ibv_context*, int> descriptors_;  // the library's own
  int refusals_ = 0;
  std::atomic<int> opened_{0};
  std::atomic<int> refused_{0};
};

std::shared_ptr<RpcPeer> make_peer(const std::shared_ptr<Context>& context, std::string name,
                                   const std::vector<PathKind>& paths) {
  RpcOptions options;
  options.name = std::move(name);
  options.transports = paths;
  return RpcPeer::create(context, std::move(options));
}

std::shared_ptr<Context> make_context(const Uid& host_key) {
  ContextOptions options;
  options.host_key = host_key;
  return Context::create(std::move(options));
}

// A server that counts, a client on another host, as far as they know, and the calls between them,
// small and large by turns. What is large lies on a CUDA device of the client.
class Calls {
 public:
  explicit Calls(const std::vector<PathKind>& paths)
      : server_(make_peer(server_context_, "server", paths)),
        client_(make_peer(client_context_, "client", paths)) {}
  ~Calls() {
    client_->close();
    server_->close();
    client_context_->stop();
    server_context_->stop();
  }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  void connect(const std::string& listen) {
    server_->define("echo", [this](const Incoming& call) {
      ++ran_;
      call.responder->send(call.arguments);
    });
    // Another host is not told of listeners at addresses of loopback, nor looks for one there.
    const std::vector<std::string> addresses = server_->listen(listen);
    const auto reached = std::ranges::find_if(
        addresses, [](const std::string& address) { return rpc::reachable(address, false); });
    client_->connect(reached == addresses.end() ? addresses.at(0) : *reached);
  }

  std::shared_ptr<Future> begin() {
    ++begun_;
    const MutableBuffer part = HeapAllocator().allocate(kSizes[begun_ % std::size(kSizes)]);
    const int fill = begun_ % 251;
    std::memset(part.data(), fill, part.size());
    const MutableBuffer body = HeapAllocator().allocate(sizeof fill);
    std::memcpy(body.data(), &fill, sizeof fill);
    const bool large = part.size() == kLargest;
    wire::Payload arguments{body, {large ? device::fake::on_device(part, 0) : Buffer(part)}};
    return client_->call("server", "echo", std::move(arguments), kCallTimeout, 1);
  }
  // Each is answered with its own bytes, and was run once.
  void check(const std::vector<std::shared_ptr<Future>>& futures) const {
    for (const auto& future : futures) {
      CHECK(future->wait(io::now() + kCallTimeout, {}));
      const auto* error = future->done() ? std::get_if<Error>(&future->outcome()) : nullptr;
      CHECK_EQ(error == nullptr ? std::string() : error->message, "");
      if (const auto* answer = std::get_if<wire::Payload>(&future->outcome())) check(*answer);
    }
    CHECK_EQ(ran_.load(), begun_);
  }
  // Calls, one after the other, until something is so.
  void call_until(const std::function<bool()>& is_so) {
    const Time deadline = io::now() + kCallTimeout;
    while (!is_so() && io::now() < deadline) check({begin()});
    CHECK(is_so());
  }
  // Whether what the client sends goes this way.
  bool go_by(PathKind kind) {
    const std::vector<rpc::PathState> paths = client_->explain("server").paths;
    return std::ranges::any_of(paths,
                               [&](const auto& path) { return path.kind == kind && path.in_use; });
  }
  // Bytes of the client's.
  std::uint64_t written(PathKind kind) {
    return client_->stats().paths[static_cast<std::size_t>(kind)].bytes_written;
  }

 private:
  static void check(const wire::Payload& answer) {
    int fill = 0;
    std::memcpy(&fill, answer.body.data(), sizeof fill);
    const auto right = [&](std::byte byte) { return byte == static_cast<std::byte>(fill); };
    CHECK(std::ranges::all_of(answer.parts.at(0).span(), right));
  }

  std::atomic<int> ran_{0};
  int begun_ = 0;
  std::shared_ptr<Context> server_context_ = make_context({1, 1});
  std::shared_ptr<Context> client_context_ = make_context({2, 2});
  std::shared_ptr<RpcPeer> server_;
  std::shared_ptr<RpcPeer> client_;
};

// The device fails in the middle of these.
void check_calls_under_failure(Calls& calls, FailingDevices& devices, bool newest, int refusals) {
  std::vector<std::shared_ptr<Future>> on_their_way;
  for (int i = 0; i < 9; ++i) on_their_way.push_back(calls.begin());
  devices.fail(newest, refusals);
  for (int i = 0; i < 9; ++i) on_their_way.push_back(calls.begin());
  calls.check(on_their_way);
}

void test_failures(int refusals) {
  FailingDevices devices;
  Calls calls({PathKind::verbs});
  calls.connect("verbs://127.0.0.1:0");
  calls.check({calls.begin()});
  for (int failure = 0; failure < kFailures; ++failure) {
    const int opened = devices.opened();
    check_calls_under_failure(calls, devices, failure % 2 == 0, refusals);
    const Time deadline = io::now() + kCallTimeout;
    while (devices.opened() == opened && io::now() < deadline) std::this_thread::yield();
    CHECK(devices.opened() > opened);
    calls.check({calls.begin()});
  }
}

void test_tcp_stands_in() {
  FailingDevices devices;
  Calls calls({PathKind::verbs, PathKind::tcp});
  calls.connect("tcp://*:0");
  calls.call_until([&] { return calls.go_by(PathKind::verbs); });
  for (int failure = 0; failure < kFailures; ++failure) {
    const int refused = devices.refused();
    check_calls_under_failure(calls, devices, failure % 2 == 0, std::numeric_limits<int>::max());
    calls.call_until([&] { return calls.go_by(PathKind::tcp); });
    const std::uint64_t by_tcp = calls.written(PathKind::tcp);
    calls.call_until([&] { return devices.refused() > refused + 1; });
    for (std::size_t i = 0; i < std::size(kSizes); ++i) calls.check({calls.begin()});
    CHECK(calls.written(PathKind::tcp) >= by_tcp + kLargest);
    devices.come_back();
    calls.call_until([&] { return calls.go_by(PathKind::verbs); });
    const std::uint64_t by_verbs = calls.written(PathKind::verbs);
    for (std::size_t i = 0; i < std::size(kSizes); ++i) calls.check({calls.begin()});
    CHECK(calls.written(PathKind::verbs) >= by_verbs + kLargest);
  }
}

// A test that needs a device; without one there is no such test.
struct OnDevice {
  OnDevice(const std::string& name, std::function<void()> body) {
    if (transport::verbs::availability().usable) {
      check::add_test("verbs: " + name, std::move(body));
    }
  }
};

const OnDevice fatal("a device that fails under calls is opened anew, and each call runs once",
                     [] { test_failures(0); });
const OnDevice removed("a device that is away for a while: the calls wait for it, and run once",
                       [] { test_failures(3); });
const OnDevice beside_tcp("tcp takes over from a device that fails, until it can be opened again",
                          test_tcp_stands_in);

}  // namespace verbs_peers_test
}  // namespace moolink::runtime
