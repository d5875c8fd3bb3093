#include "transport/verbs/device.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace moolink::transport::verbs {
namespace {

constexpr std::size_t kSlotsOfBlock = 64;
constexpr std::size_t kMostSlots = 4096;

[[noreturn]] void fail(const Port& port, const std::string& what) {
  throw Exception(ErrorCode::error, port.device + ": " + what);
}

void make_non_blocking(int descriptor) {
  fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
}

}  // namespace

Device::Device(const Library& library, const Port& port)
    : library_(library), port_(port), sources_(std::make_unique<Registrations>(*this)) {
  try {
    open();
  } catch (const Exception&) {
    release();
    throw;
  }
}

Device::~Device() { release(); }

void Device::open() {
  int count = 0;
  ibv_device** list = library_.get_device_list(&count);
  for (int i = 0; list != nullptr && i < count; ++i) {
    if (library_.get_device_name(list[i]) != port_.device) continue;
    context_ = library_.open_device(list[i]);
  }
  const int error = errno;
  if (list != nullptr) library_.free_device_list(list);
  if (context_ == nullptr) fail(port_, std::string("cannot be opened: ") + std::strerror(error));
  auto attributes = zeroed<ibv_device_attr>();
  if (library_.query_device(context_, &attributes) != 0) fail(port_, "tells nothing of itself");
  domain_ = library_.alloc_pd(context_);
  channel_ = library_.create_comp_channel(context_);
  if (domain_ == nullptr || channel_ == nullptr) {
    fail(port_, std::string("cannot be used: ") + std::strerror(errno));
  }
  most_slots_ = std::min<std::size_t>(kMostSlots,
                                      static_cast<std::size_t>(std::max(attributes.max_srq_wr, 0)));
  auto of_queue = zeroed<ibv_srq_init_attr>();
  of_queue.attr.max_wr = static_cast<std::uint32_t>(most_slots_);
  of_queue.attr.max_sge = 1;
  receive_queue_ = library_.create_srq(domain_, &of_queue);
  if (receive_queue_ == nullptr) {
    fail(port_, std::string("has no shared receive queue: ") + std::strerror(errno));
  }
  make_non_blocking(channel_->fd);
  make_non_blocking(context_->async_fd);
}

void Device::release() noexcept {
  if (receive_queue_ != nullptr) library_.destroy_srq(receive_queue_);
  sources_.reset();
  blocks_.clear();
  if (channel_ != nullptr) library_.destroy_comp_channel(channel_);
  if (domain_ != nullptr) library_.dealloc_pd(domain_);
  if (context_ != nullptr) library_.close_device(context_);
}

template <class Make>
Region Device::make_region(Make make) {
  ibv_mr* region = make();
  if (region == nullptr) {
    sources_->drop_unused();
    region = make();
  }
  return {library_, region};
}

Region Device::register_memory(void* address, std::size_t bytes, int access) {
  return make_region([&] { return library_.reg_mr(domain_, address, bytes, access); });
}

Region Device::register_block(const device::Block& block, int access) {
  if (library_.reg_dmabuf_mr == nullptr) {
    fail(port_, "libibverbs is too old for memory of CUDA devices (dmabuf)");
  }
  const Descriptor dmabuf = block.export_dmabuf();
  // The region uses the addresses that the block has in this process.
  const auto address = reinterpret_cast<std::uintptr_t>(block.data());
  Region region = make_region([&] {
    return library_.reg_dmabuf_mr(domain_, 0, block.bytes(), address, dmabuf.get(), access);
  });
  if (!region) {
    fail(port_, std::string("memory of a CUDA device cannot be registered (dmabuf): ") +
                    std::strerror(errno));
  }
  return region;
}

void Device::add_user(std::size_t slots) {
  while (blocks_.size() * kSlotsOfBlock < std::min(wanted_slots_ + slots, most_slots_)) add_block();
  wanted_slots_ += slots;
}

void Device::add_block() {
  Block block;
  block.memory = HeapAllocator().allocate(kSlotsOfBlock * kSlotBytes);
  block.region = register_memory(block.memory.data(), block.memory.size(), IBV_ACCESS_LOCAL_WRITE);
  if (!block.region) {
    fail(port_, "no memory for messages can be registered: " + registration_failure(errno));
  }
  const std::uint64_t first = blocks_.size() * kSlotsOfBlock;
  blocks_.push_back(std::move(block));
  const std::uint64_t end = std::min<std::uint64_t>(first + kSlotsOfBlock, most_slots_);
  for (std::uint64_t number = first; number < end; ++number) post_slot(number);
}

std::span<const std::byte> Device::slot(std::uint64_t number) const {
  return blocks_.at(number / kSlotsOfBlock)
      .memory.slice(number % kSlotsOfBlock * kSlotBytes, kSlotBytes)
      .span();
}

void Device::post_slot(std::uint64_t number) noexcept {
  const Block& block = blocks_.at(number / kSlotsOfBlock);
  auto where = zeroed<ibv_sge>();
  where.addr = reinterpret_cast<std::uintptr_t>(slot(number).data());
  where.length = kSlotBytes;
  where.lkey = block.region.local_key();
  auto request = zeroed<ibv_recv_wr>();
  request.wr_id = number;
  request.sg_list = &where;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  if (library_.post_srq_recv(receive_queue_, &request, &bad) != 0) set_failed();
}

void Device::abandon() noexcept {
  ::close(channel_->fd);
  ::close(context_->async_fd);
  ::close(context_->cmd_fd);
}

}  // namespace moolink::transport::verbs
