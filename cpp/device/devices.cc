#include "device/devices.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <utility>

#include "base/environment_variable.h"
#include "base/error.h"
#include "base/round_up.h"
#include "base/streaming_copy.h"
#include "base/time.h"

namespace moolink::device {
namespace {

constexpr std::int32_t kCuda = 2;
constexpr std::int32_t kCudaHost = 3;
constexpr std::int32_t kCudaManaged = 13;

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kSmallestChunk = std::size_t{256} << 10;
constexpr std::size_t kChunks = 4;    // of a transfer of at least that size
constexpr std::size_t kInFlight = 4;  // slots that one copy uses at most
// A thread that waits for a device polls it for this long before it sleeps.
constexpr auto kSpin = std::chrono::microseconds(100);

}  // namespace

bool is_cuda(const tensor::Device& device) {
  return device.type == kCuda || device.type == kCudaHost || device.type == kCudaManaged;
}

bool is_on_device(const tensor::Device& device) { return device.type == kCuda; }

std::string device_text(int device) { return tensor::Device{kCuda, device}.name(); }

Devices::Current::Current(Devices& devices, int device) : driver(devices.driver_) {
  devices.check(driver.context_push(devices.context(device)), device, "making its context current");
}

Devices::Current::~Current() {
  ContextHandle popped = nullptr;
  driver.context_pop(&popped);
}

template <class Handle, class Create>
Handle Devices::take(int device, std::vector<Handle> Device::* idle, const char* what,
                     Create&& create) {
  {
    const std::lock_guard lock(mutex_);
    auto& handles = devices_[static_cast<std::size_t>(device)].*idle;
    if (!handles.empty()) {
      Handle handle = handles.back();
      handles.pop_back();
      return handle;
    }
  }
  Handle handle = nullptr;
  check(create(&handle), device, what);
  return handle;
}

template <class Handle>
void Devices::give_back(int device, std::vector<Handle> Device::* idle, Handle handle) {
  const std::lock_guard lock(mutex_);
  (devices_[static_cast<std::size_t>(device)].*idle).push_back(handle);
}

// One of the device's events, with its context current.
class Devices::Event {
 public:
  Event(Devices& devices, int device)
      : devices_(devices),
        device_(device),
        handle_(devices.take(device, &Device::idle_events, "making an event", [&](auto* made) {
          return devices.driver_.event_create(made, kEventDisableTiming | kEventBlockingSync);
        })) {}
  ~Event() { devices_.give_back(device_, &Device::idle_events, handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  EventHandle handle() const { return handle_; }
  void record(StreamHandle stream) {
    devices_.check(devices_.driver_.event_record(handle_, stream), device_, "recording an event");
  }
  void wait() {
    const Time spin_until = std::chrono::steady_clock::now() + kSpin;
    do {
      const Status status = devices_.driver_.event_query(handle_);
      if (status == kSuccess) return;
      if (status != kNotReady) devices_.check(status, device_, "the work queued there");
    } while (std::chrono::steady_clock::now() < spin_until);
    devices_.check(devices_.driver_.event_synchronize(handle_), device_, "the work queued there");
  }

 private:
  Devices& devices_;
  const int device_;
  const EventHandle handle_;
};

// Transfers of one direction, in chunks through pinned slots: while the device copies one chunk,
// the processor copies another. Small transfers share a chunk.
class Devices::Pipeline {
 public:
  Pipeline(Devices& devices, int device, StreamHandle stream, bool to_host)
      : devices_(devices), device_(device), stream_(stream), to_host_(to_host) {}
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  ~Pipeline() {
    if (!chunks_.empty()) {
      // An error: the device may still be using the slots.
      devices_.driver_.stream_synchronize(stream_);
    }
    for (Chunk& chunk : chunks_) devices_.staging_.give_back(chunk.slot);
  }

  void run(std::span<const Transfer> transfers, std::size_t total) {
    total_ = total;
    chunk_bytes_ = std::clamp(round_up(total / kChunks, kAlignment),
                              std::min(kSmallestChunk, devices_.staging_.slot_bytes()),
                              devices_.staging_.slot_bytes());
    for (const Transfer& transfer : transfers) {
      for (std::size_t done = 0; done < transfer.bytes;) {
        if (open_ == nullptr && !open()) return copy_directly(transfers);
        const std::size_t bytes = std::min(transfer.bytes - done, chunk_bytes_ - open_->used);
        put({transfer.from + done, transfer.to + done, bytes});
        done += bytes;
        if (open_->used >= chunk_bytes_) submit();
      }
    }
    if (open_ != nullptr) submit();
    while (!chunks_.empty()) devices_.staging_.give_back(retire());
  }

 private:
  struct Chunk {
    Chunk(Devices& devices, int device, std::byte* memory) : slot(memory), event(devices, device) {}
    std::byte* slot;
    Event event;
    std::size_t used = 0;
    std::vector<Transfer> leaving;  // copied out of the slot once the device has written it
  };

  // False: there is no pinned memory.
  bool open() {
    std::byte* slot = nullptr;
    if (chunks_.empty()) {
      slot = devices_.staging_.take();
      if (slot == nullptr) return false;
    } else if (chunks_.size() < kInFlight) {
      slot = devices_.staging_.try_take();
    }
    if (slot == nullptr) slot = retire();
    try {
      chunks_.emplace_back(devices_, device_, slot);
    } catch (...) {
      devices_.staging_.give_back(slot);
      throw;
    }
    open_ = &chunks_.back();
    return true;
  }

  void put(const Transfer& piece) {
    std::byte* place = open_->slot + open_->used;
    if (to_host_) {
      enqueue(place, piece.from, piece.bytes);
      open_->leaving.push_back({place, piece.to, piece.bytes});
    } else {
      std::memcpy(place, piece.from, piece.bytes);
      enqueue(piece.to, place, piece.bytes);
    }
    open_->used += round_up(piece.bytes, kAlignment);
  }

  void enqueue(std::byte* to, const std::byte* from, std::size_t bytes) {
    devices_.check(devices_.driver_.copy(address(to), address(from), bytes, stream_), device_,
                   to_host_ ? "copying to the host" : "copying to the device");
  }

  void submit() {
    open_->event.record(stream_);
    open_ = nullptr;
  }

  // Ends the oldest chunk; returns its slot.
  std::byte* retire() {
    Chunk& oldest = chunks_.front();
    oldest.event.wait();
    for (const Transfer& piece : oldest.leaving) {
      streaming_copy({piece.to, piece.bytes}, {piece.from, piece.bytes}, total_);
    }
    std::byte* slot = oldest.slot;
    chunks_.pop_front();
    return slot;
  }

  // Through the driver's own buffers.
  void copy_directly(std::span<const Transfer> transfers) {
    for (const Transfer& transfer : transfers) {
      if (transfer.bytes != 0) enqueue(transfer.to, transfer.from, transfer.bytes);
    }
    devices_.check(devices_.driver_.stream_synchronize(stream_), device_, "the work queued there");
  }

  Devices& devices_;
  const int device_;
  const StreamHandle stream_;
  const bool to_host_;
  std::size_t total_ = 0;
  std::size_t chunk_bytes_ = 0;
  std::deque<Chunk> chunks_;  // the oldest first
  Chunk* open_ = nullptr;     // the last one, while it is filled
};

// --- Stream

Stream::~Stream() { devices_.give_back(device_, &Devices::Device::idle_streams, handle_); }

void Stream::follow(void* producer) {
  const Devices::Current current(devices_, device_);
  Devices::Event event(devices_, device_);
  event.record(static_cast<StreamHandle>(producer));
  // The event may be reused at once: the wait is for the earlier record.
  devices_.check(devices_.driver_.stream_wait_event(handle_, event.handle(), 0), device_,
                 "waiting for the producer's stream");
}

namespace {

std::size_t total_of(std::span<const Transfer> transfers) {
  std::size_t total = 0;
  for (const Transfer& transfer : transfers) total += transfer.bytes;
  return total;
}

}  // namespace

void Stream::copy(std::span<const Transfer> transfers, bool to_host) {
  const std::size_t total = total_of(transfers);
  if (total == 0) return;
  const Devices::Current current(devices_, device_);
  Devices::Pipeline(devices_, device_, handle_, to_host).run(transfers, total);
  const std::lock_guard lock(devices_.mutex_);
  Counters& counters = devices_.counters_;
  (to_host ? counters.bytes_to_host : counters.bytes_to_device) += total;
  ++(to_host ? counters.copies_to_host : counters.copies_to_device);
}

void Stream::copy_within_device(std::span<const Transfer> transfers) {
  const std::size_t total = total_of(transfers);
  if (total == 0) return;
  const Devices::Current current(devices_, device_);
  try {
    for (const Transfer& transfer : transfers) {
      devices_.check(devices_.driver_.copy(address(transfer.to), address(transfer.from),
                                           transfer.bytes, handle_),
                     device_, "copying within the device");
    }
    Devices::Event copied(devices_, device_);
    copied.record(handle_);
    copied.wait();
  } catch (const Exception&) {
    devices_.driver_.stream_synchronize(handle_);  // it must not write when others have the memory
    throw;
  }
  const std::lock_guard lock(devices_.mutex_);
  devices_.counters_.bytes_within_device += total;
}

// --- Devices

namespace {

// Off by default: no hardware has proven it.
bool sharing_is_wanted() { return environment_variable("MOOLINK_CUDA_IPC") == "1"; }

std::atomic<Devices*> used{nullptr};

}  // namespace

Devices::Devices(const Driver& driver, StagingOptions staging, bool share)
    : driver_(driver), pid_(getpid()), share_(share), staging_(driver, staging) {
  Status status = driver.init(0);
  if (status == kSuccess) status = driver.device_count(&count_);
  if (status != kSuccess) {
    throw Exception(ErrorCode::error, "CUDA cannot be used: " + describe(driver, status));
  }
  devices_.resize(static_cast<std::size_t>(count_));
}

Devices& Devices::process() {
  // After an error, the next call tries again.
  static Devices& devices = *new Devices(load_driver(), {}, sharing_is_wanted());
  used = &devices;
  devices.check_process();
  return devices;
}

Devices* Devices::process_if_used() { return used; }

void Devices::check_process() const {
  if (pid_ == getpid()) return;
  throw Exception(ErrorCode::error,
                  "CUDA cannot be used in a process that was forked from one that uses it: start "
                  "processes with the method \"spawn\" or \"forkserver\"");
}

void Devices::check(Status status, int device, const char* what) const {
  if (status == kSuccess) return;
  throw Exception(ErrorCode::error, std::string(what) + " failed on " + device_text(device) + ": " +
                                        describe(driver_, status));
}

ContextHandle Devices::context(int device) {
  check_process();
  const std::lock_guard lock(mutex_);
  if (device < 0 || device >= count_) {
    throw Exception(ErrorCode::error, "there is no " + device_text(device) + " here: CUDA has " +
                                          std::to_string(count_) + " devices");
  }
  ContextHandle& context = devices_[static_cast<std::size_t>(device)].context;
  if (context == nullptr) {
    check(driver_.primary_context_retain(&context, number(device)), device,
          "taking its primary context");
  }
  return context;
}

int Devices::number(int device) const {
  int number = 0;
  check(driver_.device_get(&number, device), device, "looking it up");
  return number;
}

std::shared_ptr<Stream> Devices::stream(int device) {
  // The captures of one thread for one message share a stream, with a single wait.
  thread_local struct {
    const Devices* devices = nullptr;
    std::weak_ptr<Stream> stream;
  } held;
  if (held.devices == this) {
    if (auto stream = held.stream.lock(); stream != nullptr && stream->device() == device) {
      return stream;
    }
  }
  const Current current(*this, device);
  auto stream = std::make_shared<Stream>(
      *this, device, take(device, &Device::idle_streams, "making a stream", [&](auto* made) {
        return driver_.stream_create(made, kStreamNonBlocking);
      }));
  held.devices = this;
  held.stream = stream;
  return stream;
}

Counters Devices::counters() const {
  const std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.pinned_bytes = staging_.pinned_bytes();
  return counters;
}

}  // namespace moolink::device
