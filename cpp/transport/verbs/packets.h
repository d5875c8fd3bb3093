#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "transport/verbs/device.h"
#include "transport/verbs/queue_pair.h"

namespace moolink::transport::verbs {

// The immediate data of each SEND of the stream. Both numbers wrap around.
struct Immediate {
  std::uint16_t taken = 0;  // SENDs of the other side taken so far
  std::uint16_t marks = 0;  // sent by this side so far; this SEND is read after them

  static Immediate of(std::uint32_t bits) {
    return {static_cast<std::uint16_t>(bits), static_cast<std::uint16_t>(bits >> 16)};
  }
  std::uint32_t bits() const { return std::uint32_t{marks} << 16 | taken; }
};

// The stream of frames as SENDs, from slots of this side into slots of the peer, one for each
// credit. Marks (Writes) are SENDs too and need credits.
class PacketWriter {
 public:
  // Throws Exception{error} if no memory can be registered.
  PacketWriter(Device& device, QueuePair& pair);

  void set_credits(std::uint32_t credits) { credits_ = credits; }
  // Credits of SENDs that the peer has taken by now. Throws Exception{wire} for an impossible
  // number.
  void taken_by_peer(std::uint16_t taken);
  // A SEND of the peer was taken, which the next one of this side reports.
  void took() { ++taken_; }
  // How many of them were not reported yet.
  std::uint32_t owed() const { return static_cast<std::uint16_t>(taken_ - told_); }
  // Requests up to this one have ended: their slots are free.
  void ended(std::uint64_t request);

  bool has_credit() const { return in_flight() < credits_; }
  // A mark was sent by another queue pair: later SENDs are read after it.
  void marked();
  // Whether a SEND could leave now.
  bool ready() const { return has_credit() && free_slots() > 0 && pair_.room() > 0; }
  // Copies as much as can leave now and returns that number.
  std::size_t write(std::span<const std::byte> bytes);
  // Sends the copied bytes.
  void publish();
  // An empty SEND, which reports taken SENDs and needs no credit; false: not now. tell: request a
  // completion for it, and with it for all before it.
  bool send_empty(bool tell);
  // SENDs without a requested completion.
  bool has_silent() const { return silent_ > 0; }

  bool has_slot() const { return free_slots() > 0; }
  // A free slot, for a caller that sends from it itself; empty: there is none.
  std::span<std::byte> borrow();
  // It is in use until this request has ended.
  void borrowed(std::uint64_t request);
  std::uint32_t key() const { return region_.local_key(); }

  static constexpr std::uint32_t kSlots = 32;
  static constexpr std::uint32_t kMostEmpty = 3;  // in transit at a time

 private:
  struct InUse {
    std::uint64_t request;
    bool slot;
    bool empty;
  };

  std::span<std::byte> slot(std::uint64_t number);
  std::uint64_t free_slots() const { return kSlots - (next_slot_ - freed_slots_); }
  bool asks() { return ++silent_ >= kTellEvery ? (silent_ = 0, true) : false; }
  std::uint32_t in_flight() const { return static_cast<std::uint16_t>(sent_ - taken_by_peer_); }
  std::uint32_t immediate() const { return Immediate{taken_, marks_}.bits(); }
  void post();

  static constexpr std::uint32_t kTellEvery = 8;

  QueuePair& pair_;
  MutableBuffer memory_;
  Region region_;
  std::uint64_t next_slot_ = 0;    // being written now
  std::uint64_t freed_slots_ = 0;  // those before it are free
  std::size_t filled_ = 0;         // bytes of next_slot_
  std::vector<InUse> in_use_;      // in the order of posting
  std::uint32_t silent_ = 0;
  std::uint32_t empties_ = 0;  // in transit
  std::uint32_t credits_ = 0;
  // These wrap around.
  std::uint16_t sent_ = 0;           // SENDs that need a credit
  std::uint16_t taken_by_peer_ = 0;  // of these
  std::uint16_t taken_ = 0;
  std::uint16_t told_ = 0;
  std::uint16_t marks_ = 0;
};

}  // namespace moolink::transport::verbs
