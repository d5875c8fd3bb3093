#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "device/block.h"
#include "transport/verbs/library.h"
#include "transport/verbs/port.h"
#include "transport/verbs/region.h"
#include "transport/verbs/registrations.h"

namespace moolink::transport::verbs {

// Bytes of one SEND; also the size read at once when WRITEs are copied through slots.
inline constexpr std::size_t kSlotBytes = std::size_t{16} << 10;

// An opened device, shared by the connections of one transport: one queue of slots for all
// arrivals, and one descriptor that reports completions.
class Device final : public Registrar {
 public:
  // Throws Exception{error} with the reason, and what to do.
  Device(const Library& library, const Port& port);
  ~Device() override;
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
  Region register_memory(void* address, std::size_t bytes, int access) override;
  // The same for a CUDA device's memory (GPUDirect). Throws Exception{error} with the reason.
  Region register_block(const device::Block& block, int access) override;

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

}  // namespace moolink::transport::verbs
