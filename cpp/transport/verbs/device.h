#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "device/block.h"
#include "transport/verbs/choice.h"
#include "transport/verbs/library.h"

namespace moolink::transport::verbs {

class Registrations;

// Memory that a device may read, and write if requested. Its destruction ends the registration.
class Region {
 public:
  Region() = default;
  // Null: an empty one.
  Region(const Library& library, ibv_mr* region) : library_(&library), region_(region) {}
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { reset(); }

  explicit operator bool() const { return region_ != nullptr; }
  std::uint32_t local_key() const { return region_->lkey; }
  std::uint32_t remote_key() const { return region_->rkey; }
  void reset();

 private:
  const Library* library_ = nullptr;
  ibv_mr* region_ = nullptr;
};

// Bytes of one SEND; also the size read at once when WRITEs are copied through slots.
inline constexpr std::size_t kSlotBytes = std::size_t{16} << 10;

// An opened device, shared by the connections of one transport: one queue of slots for all
// arrivals, and one descriptor that reports completions.
class Device {
 public:
  // Throws Exception{error} with the reason, and what to do.
  Device(const Library& library, const Port& port);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Library& library() const { return library_; }
  const Port& port() const { return port_; }
  ibv_context* context() const { return context_; }
  ibv_pd* domain() const { return domain_; }
  ibv_comp_channel* channel() const { return channel_; }
  ibv_srq* receive_queue() const { return receive_queue_; }

  // Empty, with errno, if the system refuses: even after all sources without a write under way were
  // released, as a limit on locked memory may require.
  Region register_memory(void* address, std::size_t bytes, int access);
  // The same for a CUDA device's memory (GPUDirect). Throws Exception{error} with the reason.
  Region register_block(const device::Block& block, int access);

  // The sources of parts, for all connections.
  Registrations& sources() { return *sources_; }

  // Slots for one more connection, or one less. Throws Exception{error} if there is no memory.
  void add_user(std::size_t slots);
  void remove_user(std::size_t slots) { wanted_slots_ -= slots; }
  std::span<const std::byte> slot(std::uint64_t number) const;
  // Its bytes were taken: the next SEND may fill it. A device that refuses it has failed.
  void post_slot(std::uint64_t number) noexcept;

  // It has failed, or is gone: do not use it for anything new.
  bool failed() const { return failed_; }
  void set_failed() { failed_ = true; }

  // In a forked child: closes the descriptors and touches nothing else.
  void abandon() noexcept;

 private:
  struct Block {
    MutableBuffer memory;
    Region region;
  };

  // The region from `make`, with a second attempt if necessary.
  template <class Make>
  Region make_region(Make make);
  void open();
  void release() noexcept;
  void add_block();

  const Library& library_;
  const Port port_;
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_srq* receive_queue_ = nullptr;
  std::unique_ptr<Registrations> sources_;
  std::vector<Block> blocks_;
  std::size_t wanted_slots_ = 0;
  std::size_t most_slots_ = 0;
  bool failed_ = false;
};

// "Cannot allocate memory", with the limit on locked memory where that may be the reason.
std::string registration_failure(int error);

}  // namespace moolink::transport::verbs
