#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "accumulate/messages.h"
#include "base/buffer.h"
#include "base/progress.h"
#include "base/time.h"
#include "base/uid.h"

namespace moolink::accumulate {

// When a round reached each of its phases at one member.
struct RoundTimes {
  Time offered = kNever;  // the member's last contribution to it; kNever: there is none
  Time cut = kNever;
  Time reduced = kNever;  // the result was here
};

// The data of one member: its own contributions and the rounds it knows, until every member has the
// rounds and its user has applied them.
class Ledger {
 public:
  struct Own {
    std::int64_t batch = 0;
    Counters counters;
    Buffer bucket;
    std::uint64_t round = 0;                        // 0: in no round
    std::uint64_t offered_in = 0;                   // the last epoch; 0: none
    std::uint64_t version = 0;                      // of the parameters that the gradients are of
    bool let_go = false;                            // the bucket, once its round is at every member
    std::shared_ptr<const Progress> progress = {};  // of the bucket, if it is still being written
    bool withdrawn = false;                         // before all of it was written
    Time offered = kNever;

    bool is_written() const { return !progress || progress->bytes() >= bucket.size(); }
  };
  struct Known {
    RoundRecord record;
    Buffer result;
    bool have = false;       // the result arrived here
    bool kept = false;       // and is still here
    bool exclusive = false;  // no other code has its memory
    RoundTimes times;
  };

  explicit Ledger(Uid self) : self_(self) {}

  // --- contributions ---
  std::uint64_t add(Time now, Buffer bucket, std::int64_t batch, Counters counters,
                    std::uint64_t version = 0, std::shared_ptr<const Progress> progress = {});
  // The rest of the contribution's bucket will not be written. Returns the contribution's round, or
  // 0.
  std::uint64_t withdraw(std::uint64_t k);
  void drop_withdrawn();  // the contributions in no round
  const std::map<std::uint64_t, Own>& own() const { return own_; }
  void mark_offered(std::uint64_t k, std::uint64_t epoch) { own_.at(k).offered_in = epoch; }
  std::int64_t uncut_batch() const;
  std::vector<std::uint64_t> drop_own();  // those not known to be in a round that stands

  // --- rounds ---
  // Starts anew at `version` and knows nothing else. Keeps results from there on if `keep`.
  void reset(std::uint64_t version, bool keep);
  // Keeps results after `version` from now on: a snapshot of that version is promised.
  void keep_after(std::uint64_t version);
  void stop_keeping();
  void add_record(Time now, const RoundRecord& record);
  bool knows(std::uint64_t round) const { return known_.contains(round); }
  struct Inputs {
    std::vector<Buffer> buckets;
    Written written;
  };
  // Buckets of this member in the round, in order of k. None for a contribution in the record that
  // differs from the member's own, or that is in another round.
  Inputs inputs(const RoundRecord& record) const;
  bool withdrew(std::uint64_t round) const;  // a contribution to the round
  void store(Time now, std::uint64_t round, Buffer result, bool exclusive = false);
  // The user owns the result's memory from now on and may write it; it is not handed on any more.
  Buffer take(std::uint64_t round);
  // For another peer, if it is still here: from then on the memory is shared.
  Buffer hand_on(std::uint64_t round);
  // Rounds after `round` never happened: their contributions are in no round again. Returns and
  // forgets those whose bucket is gone because a leader called a round stable that was not.
  std::vector<std::uint64_t> rewind(std::uint64_t round);
  // Every member has the results up to `round`.
  void set_stable(std::uint64_t round);
  void set_delivered(std::uint64_t round);

  // The next round for the user, once its result is here.
  const Known* next() const;
  const Known* find(std::uint64_t round) const;
  // Rounds in (have, round] without a result.
  std::vector<std::uint64_t> missing(std::uint64_t round) const;
  const std::map<std::uint64_t, Known>& known() const { return known_; }

  std::uint64_t have() const { return have_; }            // every result up to here has arrived
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
