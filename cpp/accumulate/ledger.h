#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "accumulate/messages.h"
#include "base/buffer.h"
#include "base/uid.h"

namespace moolink::accumulate {

// What one member holds: its own contributions and the rounds it knows, until the rounds are at
// every member and applied by its user.
class Ledger {
 public:
  struct Own {
    std::int64_t batch = 0;
    Counters counters;
    Buffer bucket;
    std::uint64_t round = 0;  // 0: in no round
    bool offered_before = false;
    std::uint64_t version = 0;  // of the parameters that it is of
    bool let_go = false;        // the bucket, once its round is at every member
  };
  struct Known {
    RoundRecord record;
    Buffer result;
    bool have = false;       // the result was here
    bool kept = false;       // and still is
    bool exclusive = false;  // its memory is nobody else's
  };

  explicit Ledger(Uid self) : self_(self) {}

  // --- contributions ---
  std::uint64_t add(Buffer bucket, std::int64_t batch, Counters counters,
                    std::uint64_t version = 0);
  const std::map<std::uint64_t, Own>& own() const { return own_; }
  void mark_offered(std::uint64_t k) { own_.at(k).offered_before = true; }
  std::int64_t uncut_batch() const;
  std::vector<std::uint64_t> drop_own();  // those not known to be in a round that stands

  // --- rounds ---
  // Starts anew at `version`: nothing is known but that. Results are kept from there on if `keep`.
  void reset(std::uint64_t version, bool keep);
  // Results after `version` are kept from now on: a snapshot of that version is promised.
  void keep_after(std::uint64_t version);
  void stop_keeping();
  void add_record(const RoundRecord& record);
  bool knows(std::uint64_t round) const { return known_.contains(round); }
  // Buckets of this member in the round, in order of k. None for what the record says of a
  // contribution that the member did not make so, or that is in another round.
  std::vector<Buffer> inputs(const RoundRecord& record) const;
  void store(std::uint64_t round, Buffer result, bool exclusive = false);
  // The user has the result's memory from now on, and may write it: it is handed on no more.
  Buffer take(std::uint64_t round);
  // For another peer, if it is still here: then the memory is nobody's alone any more.
  Buffer hand_on(std::uint64_t round);
  // Rounds after `round` never were: their contributions are in no round again. Returns, and
  // forgets, those whose bucket is gone, because a leader called a round stable that was not.
  std::vector<std::uint64_t> rewind(std::uint64_t round);
  // Every member has the results up to `round`.
  void set_stable(std::uint64_t round);
  void set_delivered(std::uint64_t round);

  // The next round for the user, when its result is here.
  const Known* next() const;
  const Known* find(std::uint64_t round) const;
  // Rounds in (have, round] without a result.
  std::vector<std::uint64_t> missing(std::uint64_t round) const;
  const std::map<std::uint64_t, Known>& known() const { return known_; }

  std::uint64_t have() const { return have_; }            // every result up to here was seen
  std::uint64_t delivered() const { return delivered_; }  // or the version of the awaited snapshot
  std::uint64_t stable() const { return stable_; }
  std::uint64_t waiting() const { return have_ > delivered_ ? have_ - delivered_ : 0; }  // results
  std::size_t waiting_bytes() const { return waiting_bytes_; }

 private:
  void trim();

  Uid self_;
  std::uint64_t next_k_ = 1;
  std::map<std::uint64_t, Own> own_;
  std::map<std::uint64_t, Known> known_;
  std::uint64_t have_ = 0;
  std::uint64_t delivered_ = 0;
  std::uint64_t stable_ = 0;
  bool keep_ = false;
  std::size_t waiting_bytes_ = 0;  // results held here
};

}  // namespace moolink::accumulate
