#include "transport/tcp/resolver.h"

#include <new>
#include <utility>

#include "base/barrier.h"
#include "io/quiet_thread.h"

namespace moolink::transport::tcp {

Resolver::~Resolver() {
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Resolver::abandon() noexcept { new (&thread_) std::thread(); }

void Resolver::resolve(HostPort address, Found found) {
  const std::lock_guard guard(mutex_);
  if (!thread_.joinable()) thread_ = io::quiet_thread([this] { run(); });
  questions_.push_back({std::move(address), std::move(found)});
  changed_.notify_one();
}

void Resolver::answer(const HostPort& address, const Found& found) {
  std::vector<SocketAddress> addresses;
  Error error;
  guard([&] { addresses = tcp::resolve(address); }, [&](const Error& why) { error = why; });
  found(std::move(addresses), std::move(error));
}

void Resolver::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !questions_.empty(); });
    if (stopping_) return;
    Question question = std::move(questions_.front());
    questions_.pop_front();
    lock.unlock();
    guard([&] { answer(question.address, question.found); },
          [&](const Error& error) { question.found({}, error); });
    lock.lock();
  }
}

}  // namespace moolink::transport::tcp
