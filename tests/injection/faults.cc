#include "faults.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <netdb.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" char __executable_start;  // NOLINT(bugprone-reserved-identifier): the linker's
extern "C" char etext;               // likewise: the end of the program's code

namespace moolink::faults {

thread_local int Shield::depth = 0;

namespace {

constexpr std::size_t kFrames = 6;      // of the library, that tell a point from another
constexpr int kDepth = 24;              // looked at
constexpr std::size_t kMost = 1 << 17;  // points noted
constexpr std::uint64_t kPrime = 0x100000001b3ULL;
constexpr std::uint64_t kBasis = 0xcbf29ce484222325ULL;

enum class Mode : std::uint8_t { resting, recording, armed };

struct Point {
  std::atomic<PointId> id{0};
  const char* what = nullptr;
  std::array<std::uint32_t, kFrames> frames{};
};

std::atomic<Mode> mode{Mode::resting};
std::atomic<PointId> wanted{0};
std::atomic<bool> has_fired{false};
std::atomic<std::size_t> count{0};
std::array<std::atomic<std::uint32_t>, kMost> order;  // places in `points`, as they were found
std::array<Point, kMost> points;                      // by id, open addressing
thread_local bool looking = false;

struct Stack {
  PointId id = kBasis;
  std::array<std::uint32_t, kFrames> frames{};
};

Stack stack_of(const char* what) {
  Stack stack;
  std::array<void*, kDepth> callers;
  const int depth = ::backtrace(callers.data(), kDepth);
  const auto begin = reinterpret_cast<std::uintptr_t>(&__executable_start);
  const auto end = reinterpret_cast<std::uintptr_t>(&etext);
  for (const char* at = what; *at != 0; ++at) {
    stack.id = (stack.id ^ static_cast<unsigned char>(*at)) * kPrime;
  }
  std::size_t used = 0;
  for (int i = 3; i < depth && used < kFrames; ++i) {  // without this file's own
    const auto address = reinterpret_cast<std::uintptr_t>(callers[static_cast<std::size_t>(i)]);
    if (address < begin || address >= end) continue;                       // of a system library
    stack.frames[used] = static_cast<std::uint32_t>(address - begin - 1);  // in the call itself
    stack.id = (stack.id ^ stack.frames[used]) * kPrime;
    ++used;
  }
  return stack;
}

void note(const char* what, const Stack& stack) {
  for (std::size_t at = stack.id % kMost;; at = (at + 1) % kMost) {
    PointId seen = points[at].id.load();
    if (seen == stack.id) return;
    if (seen != 0) continue;
    if (!points[at].id.compare_exchange_strong(seen, stack.id)) {
      if (seen == stack.id) return;
      continue;
    }
    points[at].what = what;
    points[at].frames = stack.frames;
    order[count++] = static_cast<std::uint32_t>(at);
    return;
  }
}

// Whether the call is to fail.
[[gnu::noinline]] bool fails(const char* what) {
  const Mode now = mode.load(std::memory_order_relaxed);
  if (now == Mode::resting || Shield::depth > 0 || looking) return false;
  looking = true;
  const Stack stack = stack_of(what);
  looking = false;
  if (now == Mode::recording) {
    note(what, stack);
    return false;
  }
  return stack.id == wanted.load() && !has_fired.exchange(true);
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

void record() {
  std::array<void*, 1> warm;
  ::backtrace(warm.data(), 1);  // its first call loads a library
  mode = Mode::recording;
}

void rest() { mode = Mode::resting; }

std::vector<PointId> recorded() {
  std::vector<PointId> ids;
  for (std::size_t i = 0; i < count; ++i) ids.push_back(points[order[i]].id);
  return ids;
}

void arm(PointId point) {
  std::array<void*, 1> warm;
  ::backtrace(warm.data(), 1);
  wanted = point;
  has_fired = false;
  mode = Mode::armed;
}

bool fired() { return has_fired; }

std::string describe(PointId point) {
  for (std::size_t at = point % kMost;; at = (at + 1) % kMost) {
    if (points[at].id == 0) return "a point that was not noted";
    if (points[at].id != point) continue;
    std::string text = points[at].what;
    for (const std::uint32_t frame : points[at].frames) {
      if (frame == 0) break;
      std::array<char, 16> hex;
      std::snprintf(hex.data(), hex.size(), " 0x%x", frame);
      text += hex.data();
    }
    return text;
  }
}

}  // namespace moolink::faults

using moolink::faults::fails;

// --- memory

void* operator new(std::size_t size) {
  if (fails("operator new")) throw std::bad_alloc();
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}

void* operator new(std::size_t size, std::align_val_t alignment) {
  if (fails("operator new")) throw std::bad_alloc();
  const auto align = static_cast<std::size_t>(alignment);
  void* memory = nullptr;
  if (::posix_memalign(&memory, align, size == 0 ? 1 : size) == 0) return memory;
  throw std::bad_alloc();
}

void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return fails("operator new") ? nullptr : std::malloc(size == 0 ? 1 : size);
}

// The library's forms of these call the ones above.
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

// --- the system's functions

#define MOOLINK_FAIL_WITH(name, error, result) \
  if (fails(#name)) {                          \
    errno = error;                             \
    return result;                             \
  }

extern "C" {

void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  MOOLINK_FAIL_WITH(aligned_alloc, ENOMEM, nullptr)
  void* memory = nullptr;
  return ::posix_memalign(&memory, alignment, size) == 0 ? memory : nullptr;
}

void* mmap(void* at, std::size_t size, int protection, int flags, int fd, off_t offset) noexcept {
  MOOLINK_FAIL_WITH(mmap, ENOMEM, MAP_FAILED)
  return reinterpret_cast<void*>(::syscall(SYS_mmap, at, size, protection, flags, fd, offset));
}

int memfd_create(const char* name, unsigned flags) noexcept {
  MOOLINK_FAIL_WITH(memfd_create, EMFILE, -1)
  return static_cast<int>(::syscall(SYS_memfd_create, name, flags));
}

int ftruncate(int fd, off_t size) noexcept {
  MOOLINK_FAIL_WITH(ftruncate, ENOSPC, -1)
  return static_cast<int>(::syscall(SYS_ftruncate, fd, size));
}

int fcntl(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  const long argument = va_arg(arguments, long);
  va_end(arguments);
  MOOLINK_FAIL_WITH(fcntl, EPERM, -1)
  return static_cast<int>(::syscall(SYS_fcntl, fd, command, argument));
}

int epoll_create1(int flags) noexcept {
  MOOLINK_FAIL_WITH(epoll_create1, EMFILE, -1)
  return static_cast<int>(::syscall(SYS_epoll_create1, flags));
}

int epoll_ctl(int epoll, int operation, int fd, epoll_event* event) noexcept {
  MOOLINK_FAIL_WITH(epoll_ctl, ENOSPC, -1)
  return static_cast<int>(::syscall(SYS_epoll_ctl, epoll, operation, fd, event));
}

int eventfd(unsigned initial, int flags) noexcept {
  MOOLINK_FAIL_WITH(eventfd, EMFILE, -1)
  return static_cast<int>(::syscall(SYS_eventfd2, initial, flags));
}

int socket(int domain, int type, int protocol) noexcept {
  MOOLINK_FAIL_WITH(socket, EMFILE, -1)
  return static_cast<int>(::syscall(SYS_socket, domain, type, protocol));
}

int socketpair(int domain, int type, int protocol, int* ends) noexcept {
  MOOLINK_FAIL_WITH(socketpair, EMFILE, -1)
  return static_cast<int>(::syscall(SYS_socketpair, domain, type, protocol, ends));
}

int bind(int fd, const sockaddr* address, socklen_t size) noexcept {
  MOOLINK_FAIL_WITH(bind, ENOMEM, -1)
  return static_cast<int>(::syscall(SYS_bind, fd, address, size));
}

int listen(int fd, int backlog) noexcept {
  MOOLINK_FAIL_WITH(listen, EADDRINUSE, -1)
  return static_cast<int>(::syscall(SYS_listen, fd, backlog));
}

int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  MOOLINK_FAIL_WITH(accept4, EMFILE, -1)
  return static_cast<int>(::syscall(SYS_accept4, fd, address, size, flags));
}

int connect(int fd, const sockaddr* address, socklen_t size) {
  MOOLINK_FAIL_WITH(connect, EADDRNOTAVAIL, -1)
  return static_cast<int>(::syscall(SYS_connect, fd, address, size));
}

int getsockopt(int fd, int level, int name, void* value, socklen_t* size) noexcept {
  MOOLINK_FAIL_WITH(getsockopt, ENOBUFS, -1)
  return static_cast<int>(::syscall(SYS_getsockopt, fd, level, name, value, size));
}

int setsockopt(int fd, int level, int name, const void* value, socklen_t size) noexcept {
  MOOLINK_FAIL_WITH(setsockopt, ENOBUFS, -1)
  return static_cast<int>(::syscall(SYS_setsockopt, fd, level, name, value, size));
}

int getsockname(int fd, sockaddr* address, socklen_t* size) noexcept {
  MOOLINK_FAIL_WITH(getsockname, ENOBUFS, -1)
  return static_cast<int>(::syscall(SYS_getsockname, fd, address, size));
}

int getpeername(int fd, sockaddr* address, socklen_t* size) noexcept {
  MOOLINK_FAIL_WITH(getpeername, ENOBUFS, -1)
  return static_cast<int>(::syscall(SYS_getpeername, fd, address, size));
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  MOOLINK_FAIL_WITH(sendmsg, ENOMEM, -1)
  return ::syscall(SYS_sendmsg, fd, message, flags);
}

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  MOOLINK_FAIL_WITH(recvmsg, ENOMEM, -1)
  return ::syscall(SYS_recvmsg, fd, message, flags);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                   void* argument) noexcept {
  if (fails("pthread_create")) return EAGAIN;
  static const auto real = moolink::faults::next<decltype(&pthread_create)>("pthread_create");
  return real(thread, attributes, body, argument);
}

}  // extern "C"
