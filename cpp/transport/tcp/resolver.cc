#include "transport/tcp/resolver.h"

#include <new>
#include <utility>

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
  questions_.push_back({std::move(address), std::move(found)});
  if (!thread_.joinable()) thread_ = io::quiet_thread([this] { run(); });
  changed_.notify_one();
}

void Resolver::answer(const HostPort& address, const Found& found) {
  std::vector<SocketAddress> addresses;
  Error error;
  try {
    addresses = tcp::resolve(address);
  } catch (const Exception& e) {
    error = e.error();
  }
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
    answer(question.address, question.found);
    lock.lock();
  }
}

}  // namespace moolink::transport::tcp
