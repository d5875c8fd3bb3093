#include "accumulate/ledger.h"

#include <algorithm>
#include <utility>

namespace moolink::accumulate {

std::uint64_t Ledger::add(Time now, Buffer bucket, std::int64_t batch, Counters counters,
                          std::uint64_t version, std::shared_ptr<const Progress> progress) {
  Own own;
  own.batch = batch;
  own.counters = std::move(counters);
  own.bucket = std::move(bucket);
  own.version = version;
  own.progress = std::move(progress);
  own.offered = now;
  own_.emplace(next_k_, std::move(own));
  return next_k_++;
}

std::int64_t Ledger::uncut_batch() const {
  std::int64_t sum = 0;
  for (const auto& [k, own] : own_) {
    if (own.round == 0 && !own.withdrawn) sum += own.batch;
  }
  return sum;
}

std::uint64_t Ledger::withdraw(std::uint64_t k) {
  const auto own = own_.find(k);
  if (own == own_.end()) return 0;
  own->second.withdrawn = true;
  return own->second.round;
}

void Ledger::drop_withdrawn() {
  std::erase_if(own_,
                [](const auto& item) { return item.second.withdrawn && item.second.round == 0; });
}

bool Ledger::withdrew(std::uint64_t round) const {
  return std::ranges::any_of(
      own_, [&](const auto& item) { return item.second.withdrawn && item.second.round == round; });
}

std::vector<std::uint64_t> Ledger::drop_own() {
  std::vector<std::uint64_t> dropped;
  for (const auto& [k, own] : own_) dropped.push_back(k);
  own_.clear();
  return dropped;
}

void Ledger::reset(std::uint64_t version, bool keep) {
  known_.clear();
  waiting_bytes_ = 0;
  have_ = delivered_ = stable_ = version;
  keep_ = keep;
}

void Ledger::keep_after(std::uint64_t version) {
  keep_ = true;
  delivered_ = version;
}

void Ledger::stop_keeping() {
  keep_ = false;
  for (auto& [round, known] : known_) {
    known.result = {};
    known.kept = false;
  }
  waiting_bytes_ = 0;
  trim();
}

void Ledger::add_record(Time now, const RoundRecord& record) {
  if (record.round <= stable_ && record.round <= have_) return;
  const auto [at, is_new] =
      known_.try_emplace(record.round, Known{record, {}, false, false, false, {}});
  RoundTimes& times = at->second.times;
  if (is_new) times.cut = now;
  for (const Contribution& contribution : record.contributions) {
    if (contribution.instance != self_) continue;
    const auto own = own_.find(contribution.k);
    // A round that stands keeps its contributions, whatever a later record says.
    if (own == own_.end() || own->second.round != 0) continue;
    own->second.round = record.round;
    const Time offered = own->second.offered;
    times.offered = times.offered == kNever ? offered : std::max(times.offered, offered);
  }
}

Ledger::Inputs Ledger::inputs(const RoundRecord& record) const {
  std::map<std::uint64_t, const Own*> in_order;
  for (const Contribution& contribution : record.contributions) {
    if (contribution.instance != self_ || contribution.batch == 0) continue;
    const auto own = own_.find(contribution.k);
    if (own == own_.end() || own->second.round != record.round) continue;
    if (own->second.batch != contribution.batch || own->second.let_go) continue;
    in_order.emplace(contribution.k, &own->second);
  }
  Inputs inputs;
  for (const auto& [k, own] : in_order) {
    inputs.buckets.push_back(own->bucket);
    if (own->progress) inputs.written.buffers.push_back(own->progress);
  }
  return inputs;
}

void Ledger::store(Time now, std::uint64_t round, Buffer result, bool exclusive) {
  const auto at = known_.find(round);
  if (at == known_.end() || at->second.have) return;
  at->second.have = true;
  at->second.times.reduced = now;
  if (keep_ && round > delivered_) {
    waiting_bytes_ += result.size();
    at->second.result = std::move(result);
    at->second.kept = true;
    at->second.exclusive = exclusive;
  }
  for (auto next = known_.find(have_ + 1); next != known_.end() && next->second.have;
       next = known_.find(have_ + 1)) {
    ++have_;
  }
  trim();
}

Buffer Ledger::take(std::uint64_t round) {
  const auto at = known_.find(round);
  if (at == known_.end() || !at->second.kept || !at->second.exclusive) return {};
  waiting_bytes_ -= at->second.result.size();
  at->second.kept = false;
  return std::exchange(at->second.result, {});
}

Buffer Ledger::hand_on(std::uint64_t round) {
  const auto at = known_.find(round);
  if (at == known_.end() || !at->second.kept) return {};
  at->second.exclusive = false;
  return at->second.result;
}

std::vector<std::uint64_t> Ledger::rewind(std::uint64_t round) {
  std::vector<std::uint64_t> dropped;
  for (auto at = known_.upper_bound(round); at != known_.end(); at = known_.erase(at)) {
    waiting_bytes_ -= at->second.result.size();
  }
  have_ = std::min(have_, round);
  for (auto at = own_.begin(); at != own_.end();) {
    Own& own = at->second;
    const bool is_open = own.round > round;
    if (is_open && own.let_go) {
      dropped.push_back(at->first);
      at = own_.erase(at);
      continue;
    }
    if (is_open) own.round = 0;
    ++at;
  }
  return dropped;
}

void Ledger::set_stable(std::uint64_t round) {
  stable_ = std::max(stable_, round);
  trim();
}

void Ledger::set_delivered(std::uint64_t round) {
  delivered_ = std::max(delivered_, round);
  trim();
}

void Ledger::trim() {
  const std::uint64_t done = keep_ ? std::min(stable_, delivered_) : stable_;
  for (auto at = known_.begin(); at != known_.end() && at->first <= std::min(done, have_);
       at = known_.erase(at)) {
    waiting_bytes_ -= at->second.result.size();
  }
  for (auto& [k, own] : own_) {
    if (own.round == 0 || own.round > stable_) continue;
    own.bucket = {};
    own.let_go = own.batch > 0;  // a skip never had one
  }
  std::erase_if(own_, [done](const auto& item) {
    return item.second.round != 0 && item.second.round <= done;
  });
}

const Ledger::Known* Ledger::next() const {
  if (!keep_) return nullptr;
  return delivered_ < have_ ? find(delivered_ + 1) : nullptr;
}

const Ledger::Known* Ledger::find(std::uint64_t round) const {
  const auto at = known_.find(round);
  return at == known_.end() ? nullptr : &at->second;
}

std::vector<std::uint64_t> Ledger::missing(std::uint64_t round) const {
  std::vector<std::uint64_t> rounds;
  for (std::uint64_t r = have_ + 1; r <= round; ++r) {
    const Known* known = find(r);
    if (known == nullptr || !known->have) rounds.push_back(r);
  }
  return rounds;
}

}  // namespace moolink::accumulate
