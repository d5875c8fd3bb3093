#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "base/uid.h"
#include "wire/archive.h"

namespace moolink::accumulate {

inline constexpr std::uint8_t kAccumulateService = 4;
inline constexpr std::uint8_t kSnapshotService = 5;

// Limit of a version that a peer may report, so that counting beyond it never wraps around.
inline constexpr std::uint64_t kLargestRound = std::uint64_t{1} << 62;

inline constexpr std::uint32_t kMostParallel = 256;  // rounds under way

inline constexpr std::int64_t kLargestBatch = std::int64_t{1} << 40;  // sums of many fit 64 bits

// Integers of one contribution (steps, episodes), summed exactly with each round.
using Counters = std::map<std::string, std::int64_t>;

// A sum of such integers. 64 bits do not hold every one, 128 do: in two's complement.
struct CounterSum {
  std::int64_t high = 0;
  std::uint64_t low = 0;

  void add(std::int64_t value) {
    const std::uint64_t before = low;
    low += static_cast<std::uint64_t>(value);
    high += (value < 0 ? -1 : 0) + (low < before ? 1 : 0);
  }
  bool fits_64_bits() const { return high == (static_cast<std::int64_t>(low) < 0 ? -1 : 0); }

  bool operator==(const CounterSum&) const = default;

  auto fields() { return std::tie(high, low); }
};
using CounterSums = std::map<std::string, CounterSum>;

inline constexpr std::size_t kMostCounters = 256;
inline constexpr std::size_t kLongestCounterName = 256;  // bytes

// One peer's k-th contribution; (instance, k) is in at most one delivered round of a lineage.
struct Contribution {
  Uid instance;
  std::string name;
  std::uint64_t k = 0;
  std::int64_t batch = 0;     // 0: no gradients, statistics only
  std::uint64_t version = 0;  // of the parameters that the gradients are of

  bool operator==(const Contribution&) const = default;

  auto fields() { return std::tie(instance, name, k, batch, version); }
};

// The content of a round, as its leader cut it.
struct RoundRecord {
  std::uint64_t round = 0;  // the model version it leads to
  std::uint64_t epoch = 0;  // in which it was cut
  std::int64_t total = 0;   // sum of the batch sizes, at least the virtual batch size
  CounterSums counters;
  std::vector<Contribution> contributions;  // in order of arrival at the leader

  bool operator==(const RoundRecord&) const = default;

  auto fields() { return std::tie(round, epoch, total, counters, contributions); }
};

// A snapshot is one leader's state at one model version.
struct SnapshotId {
  std::uint64_t epoch = 0;  // in which it was announced
  std::uint64_t version = 0;

  auto operator<=>(const SnapshotId&) const = default;

  auto fields() { return std::tie(epoch, version); }
};

// Fields that several messages share.
struct OfRound {
  std::uint64_t round = 0;

  auto fields() { return std::tie(round); }
};
struct OfSnapshot {
  SnapshotId id;

  auto fields() { return std::tie(id); }
};

// A peer's relation to the group's state.
enum class StateStatus : std::uint8_t {
  stateless,  // takes part in reductions with zeros, keeps no result
  pending,    // promised a snapshot; keeps every result after its version
  complete,   // has the state and every result after it
};
constexpr StateStatus enum_max(StateStatus) { return StateStatus::complete; }

// --- rounds --------------------------------------------------------------------------------------

// member -> leader, in order of k
struct Offer {
  std::uint64_t k = 0;
  std::int64_t batch = 0;
  Counters counters;
  std::uint64_t version = 0;

  auto fields() { return std::tie(k, batch, counters, version); }
};

// leader -> all
struct Cut {
  RoundRecord record;
  std::uint64_t shared = 0;  // number of the reduction in the epoch's segment; 0: over messages

  auto fields() { return std::tie(record, shared); }
};

// leader -> all, when an epoch begins and when its user changes one: how it cuts rounds
struct Settings {
  std::int64_t virtual_batch_size = 1;
  std::uint32_t parallel_gradients = 1;

  auto fields() { return std::tie(virtual_batch_size, parallel_gradients); }
};

// member -> leader: all results up to `have` are here, the user has applied those up to `delivered`
struct Have {
  std::uint64_t have = 0;
  std::uint64_t delivered = 0;
  bool keeps_up = false;  // complete, and behind by at most its result slots

  bool operator==(const Have&) const = default;

  auto fields() { return std::tie(have, delivered, keeps_up); }
};

// leader -> all: every member has the results up to `round`
struct Stable : OfRound {};

// member -> leader, after round `round`; leader -> all when they differ
struct Checksum {
  std::uint64_t round = 0;
  std::uint64_t value = 0;

  auto fields() { return std::tie(round, value); }
};

struct Diverged {
  std::uint64_t round = 0;
  std::vector<Uid> instances;

  auto fields() { return std::tie(round, instances); }
};

// --- change of epoch -----------------------------------------------------------------------------

struct KnownRound {
  RoundRecord record;
  bool have = false;

  auto fields() { return std::tie(record, have); }
};

// member -> coordinator (rank 0 of the view): the member's facts, unchanged until RESUME
struct Flush {
  StateStatus status = StateStatus::stateless;
  Uid lineage;                // of the last epoch that was active
  std::uint64_t applied = 0;  // last epoch whose RESUME this member carried out
  Uid applied_lineage;        // of that epoch
  std::uint64_t active = 0;   // last epoch that it knows was active (GO)
  // The epoch whose RESUME began its history, unless it knows that a later one was active.
  std::uint64_t founded = 0;
  std::uint64_t version = 0;       // of the parameters its user has
  std::uint64_t have = 0;          // all results up to here, from its version or its snapshot's on
  SnapshotId snapshot;             // awaited, when pending
  std::vector<SnapshotId> holds;   // complete snapshots it can hand on
  std::vector<KnownRound> rounds;  // not known to be at every member
  std::vector<Contribution> queued;  // offers to this member as leader, in no round yet
  std::vector<Uid> demote;           // members that held up this member as leader
  bool led = false;                  // it led the last active epoch
  bool stalled = false;              // its own user holds up the group
  std::uint64_t layout = 0;
  std::uint64_t bucket_bytes = 0;
  std::string layout_text;

  auto fields() {
    return std::tie(status, lineage, applied, applied_lineage, active, founded, version, have,
                    snapshot, holds, rounds, queued, demote, led, stalled, layout, bucket_bytes,
                    layout_text);
  }
};

struct MemberStatus {
  Uid instance;
  StateStatus status = StateStatus::stateless;
  SnapshotId snapshot;  // when pending
  std::string refused;  // not empty: takes no part, and why

  auto fields() { return std::tie(instance, status, snapshot, refused); }
};

struct SettledRound {
  RoundRecord record;
  std::vector<Uid> donors;  // members with the result

  auto fields() { return std::tie(record, donors); }
};

struct SnapshotHolders {
  SnapshotId id;
  std::vector<Uid> holders;

  auto fields() { return std::tie(id, holders); }
};

// coordinator -> all: rounds up to `round` stand, later ones never happened
struct Resume {
  Uid leader;
  std::uint64_t round = 0;
  bool fresh = false;  // no member had the state: the leader's own parameters begin a history
  std::vector<MemberStatus> members;  // in rank order
  std::vector<SettledRound> rounds;   // that some member lacks, in order
  std::vector<SnapshotHolders> snapshots;

  auto fields() { return std::tie(leader, round, fresh, members, rounds, snapshots); }
};

// member -> coordinator: RESUME is carried out, every round that stands is here
struct Ready {};

// coordinator -> all: all are ready, the epoch is active
struct Go {
  std::vector<Contribution> lost;  // of dead members, in no round that stands

  auto fields() { return std::tie(lost); }
};

// leader -> all, in the old epoch: it is at a boundary, enter epoch `next` (a soft view) now
struct Move {
  std::uint64_t next = 0;

  auto fields() { return std::tie(next); }
};

// survivor -> donor, while resuming; the answer's bytes are the payload's part
struct FetchResult : OfRound {};

struct FetchedResult : OfRound {};

// --- state transfer ------------------------------------------------------------------------------

// stateless member whose user is active -> leader
struct RequestState {};

// leader -> members that asked: keep every result after id.version, the state will follow
struct SnapshotPromised : OfSnapshot {};

// The sizes of a snapshot's payload; its bytes are cut into chunks that do not span segments.
struct SnapshotInfo {
  SnapshotId id;
  std::uint64_t layout = 0;
  std::uint32_t chunk_bytes = 0;
  std::vector<std::uint64_t> segments;  // body, then parts, bytes each
  std::vector<std::uint32_t> crc32c;    // of each chunk; none if all receivers are on one host

  auto fields() { return std::tie(id, layout, chunk_bytes, segments, crc32c); }
};

// leader -> members that asked; parents in the order in which to ask them
struct SnapshotReady {
  SnapshotInfo info;
  std::vector<Uid> parents;

  auto fields() { return std::tie(info, parents); }
};

// newcomer -> leader: the snapshot is here
struct SnapshotComplete : OfSnapshot {};

// leader -> all: no member needs it any more
struct SnapshotOver : OfSnapshot {};

using Message = std::variant<Offer, Cut, Have, Stable, Checksum, Diverged, Flush, Resume, Ready, Go,
                             Move, FetchResult, FetchedResult, RequestState, SnapshotPromised,
                             SnapshotReady, SnapshotComplete, SnapshotOver, Settings>;

// The body of every payload of service `accumulate`.
struct Envelope {
  std::string group;
  std::uint64_t epoch = 0;
  Message message;

  auto fields() { return std::tie(group, epoch, message); }
};

// newcomer -> parent
struct FetchInfo : OfSnapshot {};

struct FetchChunk {
  SnapshotId id;
  std::uint32_t chunk = 0;

  auto fields() { return std::tie(id, chunk); }
};

// parent -> newcomer; the bytes are the payload's part
struct Chunk : FetchChunk {};

// parent -> newcomer: it never had the snapshot, or released it; ask the next parent
struct Gone : OfSnapshot {};

// The body of every payload of service `snapshot`: fenced by the snapshot's id instead of the
// epoch, because a transfer continues across changes of epoch.
struct SnapshotEnvelope {
  std::string group;
  std::variant<FetchInfo, SnapshotInfo, FetchChunk, Chunk, Gone> message;

  auto fields() { return std::tie(group, message); }
};

}  // namespace moolink::accumulate
