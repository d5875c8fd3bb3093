#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "accumulate/messages.h"
#include "base/time.h"
#include "base/uid.h"

namespace moolink::accumulate {

// The leader's part of an epoch: it cuts rounds from the offers in order of arrival, knows which
// member has which results, and gathers the requests of members that need the state.
class Leader {
 public:
  struct Config {
    std::uint64_t epoch = 0;
    std::uint64_t round = 0;  // the last one that stands
    std::uint32_t parallel_gradients = 1;
    Duration snapshot_gather{};
  };
  struct Peer {
    std::string name;
    bool observer = false;
    bool complete = false;  // has the state
    bool in_need = false;   // needs a snapshot that it was not promised
  };
  // A snapshot of the version `id.version`, promised to the members that asked.
  struct Promise {
    SnapshotId id;
    std::vector<Uid> to;
    bool captured = false;
  };

  Leader(Config config, const std::map<Uid, Peer>& peers);

  void set_parallel_gradients(std::uint32_t rounds) { config_.parallel_gradients = rounds; }
  // An invalid offer, or one over the member's limit, is not queued: the member keeps it and offers
  // it again in the next epoch.
  void offer(const Uid& from, const Offer& offer);
  void have(const Uid& from, const Have& have);
  // The next round, if its contributions are there, a cut is free and no member's result slots are
  // full. The round is the shortest prefix of the offers whose sum reaches the virtual batch size.
  std::optional<RoundRecord> cut(std::int64_t virtual_batch_size);
  // The members that block a round that could be cut: their result slots are full.
  std::vector<Uid> blocked_by(std::int64_t virtual_batch_size) const;
  // The sum of the batches that wait for the next round, and the members with none among them.
  std::int64_t queued_batch() const { return queued_batch_; }
  std::vector<Uid> without_gradients() const;
  // The members that lack the result of the oldest round that is not everywhere.
  std::vector<Uid> without_oldest() const;
  std::uint64_t delivered(const Uid& member) const { return members_.at(member).delivered; }
  std::uint64_t cut_round() const { return cut_; }
  std::uint64_t stable() const;  // the last round that every member but observers has
  std::vector<Contribution> queued() const;

  // `from` gives up the snapshots promised to it; returns those that no member awaits any more.
  std::vector<SnapshotId> request_state(Time now, const Uid& from);
  // A snapshot that is due to be promised: the version is the last round that was cut.
  std::optional<SnapshotId> promise(Time now);
  std::optional<Time> promise_due() const;
  const std::optional<Promise>& promised() const { return promise_; }
  // The promised snapshot was captured. Returns its receivers; the leader waits for them from now
  // on.
  std::vector<Uid> captured();
  void awaits(const Uid& from, const SnapshotId& id) { awaited_[id].insert(from); }
  // True when no member awaits the snapshot any more.
  bool snapshot_complete(const Uid& from, const SnapshotId& id);

  // The members whose parameters after the round differ from `self`'s, as far as they are known.
  std::vector<Uid> checksum(const Uid& from, const Uid& self, const Checksum& checksum);

 private:
  struct Queue {
    std::size_t bytes = 0;
    std::int64_t batch = 0;
  };
  struct Member {
    Peer peer;
    std::uint64_t have = 0;
    std::uint64_t delivered = 0;
    bool keeps_up = false;
    std::uint64_t last_k = 0;
    // Statistics beyond their limit must not keep gradients out: only gradients make rounds.
    Queue statistics{};
    Queue gradients{};
    Time next_promise{};

    Queue& queue(std::int64_t batch) { return batch == 0 ? statistics : gradients; }
  };
  struct Queued {
    Contribution contribution;
    Counters counters;
    std::size_t bytes = 0;
  };

  bool enough(std::int64_t virtual_batch_size) const {
    return queued_batch_ > 0 && queued_batch_ >= virtual_batch_size;
  }
  bool is_full(const Member& member) const;
  template <class Which>
  std::vector<Uid> those(const Which& which) const;

  Config config_;
  std::map<Uid, Member> members_;
  std::deque<Queued> queue_;
  std::int64_t queued_batch_ = 0;
  std::uint64_t cut_ = 0;

  std::set<Uid> requests_;
  Time first_request_ = kNever;
  std::optional<Promise> promise_;
  std::map<SnapshotId, std::set<Uid>> awaited_;
  std::map<std::uint64_t, std::map<Uid, std::uint64_t>> checksums_;  // by round
};

}  // namespace moolink::accumulate
