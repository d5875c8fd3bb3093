#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>

#include "base/buffer.h"
#include "memory/pool.h"
#include "transport/verbs/device.h"

namespace moolink::transport::verbs {

// What parts are written from, registered for as long as it is the same memory (memory::home_of):
// a block of a pool, or of a CUDA device, as long as that is kept, whatever messages it serves, and
// all of it; other memory while its owner lives. It is not known by its address: after it was given
// up other memory may lie there.
class Registrations {
 public:
  explicit Registrations(Device& device) : device_(device) {}

  // Null: the system registers no more, or the bytes have no owner.
  std::shared_ptr<const Region> of(const Buffer& bytes);
  // Why no memory of CUDA devices is registered any more; empty: it is.
  const std::string& refuses_devices() const { return refuses_devices_; }
  // Ends the registrations of what was given up; of all that nobody writes from.
  void drop_dead();
  void drop_unused();
  std::size_t size() const { return entries_.size(); }

  static constexpr std::size_t kMost = 1024;
  static constexpr std::size_t kMostBytes = std::size_t{4} << 30;

 private:
  struct Entry {
    std::weak_ptr<const void> lives;
    const std::byte* begin;
    std::size_t size;
    std::shared_ptr<const Region> region;
  };

  Region make(const memory::Home& home, const device::Block* block);
  // Those that nobody writes from, the longest unused first, until so much is left.
  void drop_unused(std::size_t most, std::size_t most_bytes);

  Device& device_;
  std::list<Entry> entries_;  // the latest used first
  std::size_t bytes_ = 0;
  std::string refuses_devices_;
};

}  // namespace moolink::transport::verbs
