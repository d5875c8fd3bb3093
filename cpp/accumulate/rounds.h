#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "accumulate/ledger.h"
#include "accumulate/model_state.h"
#include "accumulate/round_settings.h"

namespace moolink::accumulate {

// A round at this member, ready for the user.
struct Round {
  RoundRecord record;
  Buffer result;          // sum of bucket_bytes, already divided by record.total; empty once taken
  bool may_take = false;  // take_result() gives the memory itself away
  RoundTimes times;

  std::uint64_t number() const { return record.round; }
};

// A member's part in the rounds of an active epoch, of the leader too: it offers contributions,
// reduces each round that the leader cuts, tells the leader which results are here, and says when
// this member's user should contribute. The contributions and results themselves are in the ledger,
// which outlives epochs; here is what is known of the rounds of one epoch, from activate() to the
// next one. Owned by the Machine, which calls it with each event about rounds and looks after each
// whether the user is to be woken.
class Rounds {
 public:
  Rounds(const Config& config, const Epoch& epoch, const RoundSettings& settings, Ledger& ledger,
         ModelState& model, Outbox& outbox)
      : config_(config),
        epoch_(epoch),
        settings_(settings),
        ledger_(ledger),
        model_(model),
        outbox_(outbox) {}

  // --- the user ----------------------------------------------------------------------------------
  // As of Machine.
  std::uint64_t offer(Time now, Buffer bucket, std::int64_t batch, Counters counters,
                      std::shared_ptr<const Progress> progress);
  void written(std::uint64_t k);
  void withdraw(std::uint64_t k);
  bool wants_gradients(Time now) const;
  std::optional<Round> next_result() const;
  bool checksum(std::uint64_t round, std::uint64_t value);  // false: not wanted now

  // --- the leader and the reductions -------------------------------------------------------------
  // In a change of epoch: later rounds never happened, and missing ones come from other members.
  void resume(Time now, const Resume& resume);
  void hand_on(const Uid& to, std::uint64_t round);
  bool fetched(Time now, std::uint64_t round, const std::vector<Buffer>& parts);  // false: ignored
  void activate(const Resume& resume, collective::SharedMembers members);
  bool cut(Time now, const Uid& from, const Cut& cut);  // false: ignored
  void stable(const Uid& from, const Stable& stable);
  void diverged(const Uid& from, const Diverged& diverged);
  bool reduced(Time now, std::uint64_t epoch, std::uint64_t round, Buffer result, bool exclusive);
  bool reduce_failed(std::uint64_t epoch, std::uint64_t round, const Error& error);

  // --- due work ----------------------------------------------------------------------------------
  void report_have();
  void catch_up_when_cuts_were_ignored();
  void tick(Time now);
  Time next_deadline() const { return fill_in_at_; }

 private:
  void send_offer(std::uint64_t k);
  void abandon_round(std::uint64_t round);
  void notice_whether_it_keeps_up();
  std::int64_t whole() const;
  std::int64_t share() const;

  const Config& config_;
  const Epoch& epoch_;
  const RoundSettings& settings_;
  Ledger& ledger_;
  ModelState& model_;
  Outbox& outbox_;
  collective::SharedMembers members_;         // of the active epoch
  std::uint64_t known_round_ = 0;             // the last one cut in this epoch
  bool cuts_ignored_ = false;                 // in this epoch: there were too many
  std::map<Uid, std::uint64_t> contributed_;  // the last round each member contributed to
  Time fill_in_at_ = kNever;                  // from then on this member fills in for slow ones
  std::optional<Have> reported_;
};

}  // namespace moolink::accumulate
