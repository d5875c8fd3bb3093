#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "transport/grant_pool.h"
#include "transport/transport.h"
#include "transport/verbs/device.h"

namespace moolink::transport::verbs {

// The memory that one peer may write into: segments of its own pool, each registered whole.
class GrantedMemory {
 public:
  explicit GrantedMemory(Device& device) : device_(device), pool_(std::make_shared<GrantPool>()) {}
  ~GrantedMemory() { revoke(); }
  GrantedMemory(const GrantedMemory&) = delete;
  GrantedMemory& operator=(const GrantedMemory&) = delete;

  // nullopt: there is no memory, or the system refuses another registration.
  std::optional<Grant> allocate(std::size_t bytes);
  // False: nothing is left that a later call could return.
  bool retire_idle();
  // The peer writes into it no more, and none of it is reused.
  void revoke();

 private:
  struct Registered {
    std::shared_ptr<memory::Segment> segment;
    Region region;
  };

  void deregister_retired();

  Device& device_;
  std::shared_ptr<GrantPool> pool_;
  std::uint64_t retired_ = 0;  // value of the pool's retired() at the last check
  std::map<std::uint64_t, Registered> segments_;
};

}  // namespace moolink::transport::verbs
