#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "transport/tcp/address.h"

namespace moolink::transport::tcp {

// Resolves names on its own thread, because getaddrinfo may block for many seconds. The thread
// starts with the first name.
class Resolver {
 public:
  // Called on the resolver's thread.
  using Found = std::function<void(std::vector<SocketAddress>, Error)>;

  Resolver() = default;
  ~Resolver();  // waits for a look-up in progress
  Resolver(const Resolver&) = delete;
  Resolver& operator=(const Resolver&) = delete;

  void resolve(HostPort address, Found found);
  // Looks up on this thread.
  static void answer(const HostPort& address, const Found& found);
  // In a forked child the thread does not exist: forget it without joining.
  void abandon() noexcept;

 private:
  struct Question {
    HostPort address;
    Found found;
  };

  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Question> questions_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace moolink::transport::tcp
