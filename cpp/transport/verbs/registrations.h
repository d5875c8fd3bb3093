#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>

#include "base/buffer.h"
#include "device/block.h"
#include "memory/pool.h"
#include "transport/verbs/region.h"

namespace moolink::transport::verbs {

// Registers memory with a device.
class Registrar {
 public:
  virtual ~Registrar() = default;
  // Empty, with errno, if the system refuses.
  virtual Region register_memory(void* address, std::size_t bytes, int access) = 0;
  // Throws Exception{error} with the reason.
  virtual Region register_block(const device::Block& block, int access) = 0;
};

// The sources of parts, registered while they are the same memory (memory::home_of): a whole block
// of a pool, or of a CUDA device, while it is kept, whatever messages it serves; other memory while
// its owner lives. Addresses do not identify it: after its release other memory may have the same
// address.
class Registrations {
 public:
  explicit Registrations(Registrar& registrar) : registrar_(registrar) {}

  // Null: the system refuses another registration, or the bytes have no owner.
  std::shared_ptr<const Region> of(const Buffer& bytes);
  // Why memory of CUDA devices is not registered any more; empty: it is.
  const std::string& refuses_devices() const { return refuses_devices_; }
  // Ends the registrations of released memory; of all without a write under way.
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
  // Of those without a write under way, the longest unused first, until this much is left.
  void drop_unused(std::size_t most, std::size_t most_bytes);

  Registrar& registrar_;
  std::list<Entry> entries_;  // the latest used first
  std::size_t bytes_ = 0;
  std::string refuses_devices_;
};

}  // namespace moolink::transport::verbs
