#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/time.h"
#include "collective/shared_reduce.h"
#include "io/loop.h"
#include "memory/segment.h"
#include "runtime/peer/rpc_peer.h"
#include "runtime/shared_memory/host_segment.h"

namespace moolink::runtime {

// Reduces the rounds of one accumulator through a shared segment while all members of the epoch are
// on one host and reach one another through shared memory; otherwise it is never ready, and the
// rounds use messages. docs/design/protocol/shared_memory.md.
//
// Once all ranks have attached the segment, the leader numbers the reductions in its cuts, so that
// all members reduce a round the same way. All calls, in both directions, are made with the
// engine's lock held.
class SharedRounds final : public io::Pollable, public std::enable_shared_from_this<SharedRounds> {
 public:
  using Members = HostSegment::Members;
  struct Events {
    std::function<void(std::uint64_t epoch)> ready;
    // No other reference to the result's memory exists.
    std::function<void(std::uint64_t epoch, std::uint64_t round, Buffer result)> done;
    std::function<void(std::uint64_t epoch, std::uint64_t round, const Error& error)> failed;
  };
  // Reduction number `s` of the epoch.
  struct Round {
    std::uint64_t epoch = 0;
    std::uint64_t s = 0;
    std::uint64_t round = 0;
    std::int64_t total = 0;
    std::vector<Buffer> inputs;  // this member's
    std::vector<std::uint32_t> contributors;
    std::vector<std::uint32_t> reducers;
  };

  static std::shared_ptr<SharedRounds> create(std::shared_ptr<RpcPeer> rpc, std::string group,
                                              std::string scope,
                                              std::vector<collective::SharedSection> sections,
                                              std::size_t bucket_bytes, Events events);
  ~SharedRounds() override;

  // Gives up the segment of the epoch before, for all its ranks.
  void enter(Time now, Members members);
  void reduce(Round round);
  // Memory of the segment for a contribution, which saves a copy; empty if there is none. Its
  // holder keeps it, even after the epoch, until the last reference is dropped.
  MutableBuffer input();
  void tick(Time now) { segment_->tick(now); }
  Time next_deadline() const { return segment_->next_deadline(); }
  void close();

  bool poll() override;
  bool prepare_sleep() override;
  void awake() override;

 private:
  // A round on its way in or out.
  struct Passing {
    Round round;
    std::size_t next = 0;           // next piece to copy
    std::vector<Buffer> elsewhere;  // inputs outside the segment
    MutableBuffer own = {};         // the result of a whole operation
  };
  // The inputs of the segment that input() returns.
  static constexpr std::uint32_t kLentInputs = 3;
  struct Lent {
    std::shared_ptr<memory::Segment> segment;  // stays mapped while one of them is away
    std::array<std::atomic<bool>, kLentInputs> away{};
  };
  struct Piece {
    tensor::DType dtype;
    std::uint64_t offset;
    std::uint64_t bytes;
  };

  SharedRounds(std::shared_ptr<RpcPeer> rpc, std::vector<collective::SharedSection> sections,
               std::size_t bucket_bytes, Events events);
  collective::SharedLayout layout(const Members& members) const;
  void attach();
  void leave();
  bool advance();
  bool is_whole() const { return segment_->members().instances.size() <= 2; }
  bool has_result() const;
  bool may_write_input() const;
  void write_input();
  void start();
  std::optional<std::uint32_t> lent_bucket(const Buffer& input) const;
  void read_result();
  void fail(const Error& error);

  std::shared_ptr<RpcPeer> rpc_;
  const std::vector<collective::SharedSection> sections_;
  const std::size_t bucket_bytes_;
  std::vector<Piece> pieces_;
  Events events_;
  bool closed_ = false;

  std::shared_ptr<HostSegment> segment_;
  std::unique_ptr<collective::SharedReduce> reduce_;
  std::shared_ptr<Lent> lent_;
  std::array<std::uint64_t, kLentInputs> used_by_{};  // the last operation that took each
  std::deque<Passing> incoming_;                      // not started yet
  std::deque<Passing> started_;                       // results not read yet
};

}  // namespace moolink::runtime
