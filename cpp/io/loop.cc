#include "io/loop.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "base/barrier.h"
#include "base/system_error.h"

namespace moolink::io {
namespace {

constexpr std::uint64_t kWakeId = 0;  // watches are numbered from 1
constexpr int kMaxEvents = 64;        // of one turn, so that timers are never delayed for long
constexpr int kMillisecond = 1000;    // µs
constexpr std::int64_t kLongestWait = 2'000'000'000;

}  // namespace

Time now() { return std::chrono::time_point_cast<Duration>(std::chrono::steady_clock::now()); }

Loop::Loop() : ready_(kMaxEvents) {
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_fd_ < 0) throw_system_error("epoll_create1");
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kWakeId;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, woken_up_.descriptor(), &event) != 0) {
    abandon();
    throw_system_error("epoll_ctl");
  }
}

Loop::~Loop() {
  // One by one: a callback may own its watch, its timer, or others, which end with it.
  while (!watches_.empty()) watches_.extract(watches_.begin());
  while (!timers_.empty()) timers_.extract(timers_.begin());
  abandon();
}

void Loop::abandon() noexcept {
  if (epoll_fd_ >= 0) ::close(epoll_fd_);
  epoll_fd_ = -1;
  woken_up_.abandon();
}

Loop::Watch Loop::watch(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready) {
  const WatchId id = ++last_id_;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  auto shared = std::make_shared<std::function<void(std::uint32_t)>>(std::move(ready));
  const auto added = watches_.emplace(id, Watched{fd, events, std::move(shared)}).first;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    const int error = errno;
    watches_.erase(added);
    errno = error;
    throw_system_error("epoll_ctl");
  }
  return Watch(this, End<WatchId>{id});
}

void Loop::change(const Watch& watch, std::uint32_t events) {
  const WatchId id = watch.get_deleter().key;
  const auto it = watches_.find(id);
  if (it == watches_.end() || it->second.events == events) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, it->second.fd, &event) != 0)
    throw_system_error("epoll_ctl");
  it->second.events = events;
}

void Loop::end(WatchId id) {
  const auto ended = watches_.extract(id);
  if (ended.empty()) return;  // the loop is being destroyed
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, ended.mapped().fd, nullptr);
}

template <class Work>
bool Loop::run(Work&& work) noexcept {
  return guard(work, [this](const Error& error) {
    if (failed_) failed_(error.message.c_str());
  });
}

Loop::TimerKey Loop::at(Time when, std::function<void()> due) {
  const TimerKey key{when, ++last_id_};
  const bool first = timers_.empty() || key < timers_.begin()->first;
  timers_.emplace(key, std::move(due));
  if (first) wake();
  return key;
}

bool Loop::poll_pollables() {
  bool something = false;
  // By index: a pollable may add or remove pollables.
  for (std::size_t i = 0; i < pollables_.size(); ++i) {
    run([&]() MOOLINK_LOCKED { something |= pollables_[i]->poll(); });
  }
  return something;
}

bool Loop::look_at_descriptors() {
  const int count = epoll_wait(epoll_fd_, ready_.data(), kMaxEvents, 0);
  return count > 0 && dispatch(count);
}

// The time to wait, in µs.
int Loop::prepare(Time until) {
  // Order matters: a thread that posts or wakes after this store writes to the wake descriptor.
  sleeping_.store(true);
  bool idle = !woken_.exchange(false);
  for (std::size_t i = 0; i < pollables_.size(); ++i) {
    run([&]() MOOLINK_LOCKED { idle &= pollables_[i]->prepare_sleep(); });
  }
  return idle ? timeout_us(until) : 0;
}

int Loop::wait(int timeout) {
#ifdef SYS_epoll_pwait2
  if (timeout > 0 && timeout < kMillisecond) {  // epoll_wait() would round up to a whole one
    const timespec left{0, timeout * 1000L};
    const long count =
        syscall(SYS_epoll_pwait2, epoll_fd_, ready_.data(), kMaxEvents, &left, nullptr, 0);
    if (count >= 0 || errno == EINTR) return static_cast<int>(count);
  }
#endif
  const int ms = timeout < 0 ? -1 : (timeout + kMillisecond - 1) / kMillisecond;
  return epoll_wait(epoll_fd_, ready_.data(), kMaxEvents, ms);
}

bool Loop::finish(int count) {
  awake_since_ = now();
  sleeping_.store(false);
  woken_.store(false);
  for (std::size_t i = 0; i < pollables_.size(); ++i) {
    run([&]() MOOLINK_LOCKED { pollables_[i]->awake(); });
  }
  bool something = dispatch(count);
  something |= poll_pollables();
  something |= run_timers();
  something |= take_posted();
  only_woken_ = !something;
  return count >= 0;
}

int Loop::timeout_us(Time until) {
  const Time deadline = std::min(until, next_timer());
  if (deadline == kNever) return -1;
  const Duration left = deadline - now();
  if (left <= Duration::zero()) return 0;
  const auto us = std::chrono::ceil<microseconds>(left).count();
  return static_cast<int>(std::min<std::int64_t>(us, kLongestWait));
}

bool Loop::dispatch(int count) {
  bool something = false;
  for (int i = 0; i < count; ++i) {
    const epoll_event event = ready_[static_cast<std::size_t>(i)];
    const WatchId id = event.data.u64;  // a copy: the system's struct is packed
    if (id == kWakeId) continue;
    something = true;
    // A callback earlier in this turn may have removed the watch; ids are never reused.
    const auto it = watches_.find(id);
    if (it == watches_.end()) continue;
    const auto ready = it->second.ready;  // keeps the callback alive if it removes itself
    run([&] { (*ready)(event.events); });
  }
  return something;
}

bool Loop::run_timers() {
  if (timers_.empty()) return false;
  bool something = false;
  const Time current = now();
  while (!timers_.empty() && timers_.begin()->first.first <= current) {
    auto node = timers_.extract(timers_.begin());
    run(node.mapped());
    something = true;
  }
  return something;
}

bool Loop::take_posted() {
  Prepared work;
  {
    const std::lock_guard guard(posted_mutex_);
    work.swap(posted_);
  }
  for (auto& item : work) run(item);
  return !work.empty();
}

void Loop::post(Prepared work) noexcept {
  {
    const std::lock_guard guard(posted_mutex_);
    posted_.splice(posted_.end(), work);
  }
  wake();
}

void Loop::wake() {
  woken_.store(true);
  if (sleeping_.exchange(false)) woken_up_.set();
}

}  // namespace moolink::io
