#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "accumulate/machine.h"

namespace moolink::accumulate {

inline constexpr std::size_t kBucketBytes = 64;
inline constexpr std::uint32_t kChunk = 1024;
inline constexpr std::size_t kChunks = 40;

// Machines of one group, whose messages arrive in order. Those of the transfers are kept apart, so
// that a test says when they go on.
class Peers {
 public:
  // Each machine is on its own host, except that `neighbours` machines share the leader's host.
  explicit Peers(std::size_t count, std::uint64_t set_after_flush = 0,
                 std::size_t backlog_bytes = Config{}.backlog_bytes, std::size_t neighbours = 0) {
    for (std::size_t i = 0; i < count; ++i) {
      Config config;
      config.group = "g";
      config.instance = Uid{1, i + 1};
      config.name = "p" + std::to_string(i);
      config.bucket_bytes = kBucketBytes;
      config.chunk_bytes = kChunk;
      config.backlog_bytes = backlog_bytes;
      machines_.push_back(std::make_unique<Machine>(config));
      const Uid host{9, i <= neighbours ? 1 : i + 1};
      view_.members.push_back({config.instance, config.name, 0, host, group::Role::member, 0});
    }
    machines_[0]->set_model_version(7);  // leads, and the others need its state
    view_.epoch = 1;
    view_.lineage = Uid{5, 5};
    for (auto& machine : machines_) machine->view(now_, std::make_shared<const group::View>(view_));
    if (set_after_flush > 0) machines_[0]->set_model_version(set_after_flush);
    settle();
  }

  Machine& operator[](std::size_t index) { return *machines_[index]; }
  std::size_t size() const { return machines_.size(); }
  std::size_t chunks_sent(std::size_t index) const {
    const auto sent = chunks_sent_.find(index);
    return sent == chunks_sent_.end() ? 0 : sent->second;
  }

  // What keeps this peer out, as its machine told last; "": nothing.
  std::string failure(std::size_t index) const {
    const auto failed = failures_.find(index);
    return failed == failures_.end() ? std::string() : failed->second;
  }
  bool wants_gradients(std::size_t index) const { return machines_[index]->wants_gradients(now_); }
  // All have the state of the first.
  void share_state(const Buffer& bytes) {
    users_come();
    transfer_state(bytes);
    for (std::size_t i = 1; i < size(); ++i) {
      if (const auto state = machines_[i]->new_state()) install(i, state->number);
    }
  }

  // The number of views that machines asked for.
  std::size_t demotions() const { return demotions_; }
  std::size_t warnings() const { return warnings_; }
  // The leader's last description of a snapshot.
  const SnapshotInfo& described() const { return described_; }
  // Messages that let a member free the snapshot that it holds.
  std::size_t snapshots_over() const { return snapshots_over_; }
  void pass(Duration duration) {
    for (const Time end = now_ + duration; now_ < end;) {
      now_ += milliseconds(250);
      for (auto& machine : machines_) machine->tick(now_);
      settle();
    }
  }

  // All messages but those of transfers.
  void settle() {
    bool again = true;
    while (std::exchange(again, false)) {
      for (std::size_t i = 0; i < size(); ++i) again = carry_out(i) || again;
      for (auto mail = std::exchange(mail_, {}); !mail.empty(); mail.pop_front()) {
        again = true;
        deliver(mail.front());
      }
    }
  }
  // One message of a transfer, and what follows from it; false: there is none.
  bool transfer() {
    if (transfers_.empty()) return false;
    const Mail mail = std::move(transfers_.front());
    transfers_.pop_front();
    deliver(mail);
    settle();
    return true;
  }
  void users_come() {
    now_ += seconds(1);
    for (auto& machine : machines_) machine->user_active(now_);
    settle();
    for (auto& machine : machines_) machine->tick(now_);
    settle();
  }
  void user_comes(std::size_t index) {
    now_ += seconds(1);
    machines_[index]->user_active(now_);
    settle();
    for (auto& machine : machines_) machine->tick(now_);
    settle();
  }
  void contribute(std::size_t index) {
    machines_[index]->offer(now_, HeapAllocator().allocate(kBucketBytes), 1, {});
    settle();
  }
  void apply(std::size_t index) {
    const auto round = machines_[index]->next_result();
    if (round) machines_[index]->delivered(now_, round->number());
    settle();
  }
  void install(std::size_t index, std::uint64_t state) {
    machines_[index]->state_installed(now_, state);
    settle();
  }
  void refuse(std::size_t index, std::uint64_t state) {
    machines_[index]->refuse_state(now_, state);
    settle();
  }
  // All others die.
  void leave_alone(std::size_t index) {
    ++view_.epoch;
    group::View alone = view_;
    alone.members = {view_.members[index]};
    machines_[index]->view(now_, std::make_shared<const group::View>(alone));
    settle();
  }
  // Another epoch of the same members.
  void change_epoch() {
    ++view_.epoch;
    for (auto& machine : machines_) machine->view(now_, std::make_shared<const group::View>(view_));
    settle();
  }
  // Another epoch, which only this peer enters.
  void enter_alone(std::size_t index) {
    ++view_.epoch;
    machines_[index]->view(now_, std::make_shared<const group::View>(view_));
    settle();
  }
  // Offers a bucket that is written up to `progress`; returns the contribution's number.
  std::uint64_t contribute_unwritten(std::size_t index, std::shared_ptr<const Progress> progress) {
    const std::uint64_t k = machines_[index]->offer(now_, HeapAllocator().allocate(kBucketBytes), 1,
                                                    {}, std::move(progress));
    settle();
    return k;
  }
  void written(std::size_t index, std::uint64_t k) {
    machines_[index]->written(now_, k);
    settle();
  }
  void withdraw(std::size_t index, std::uint64_t k) {
    machines_[index]->withdraw(now_, k);
    settle();
  }
  // What the machine of `from` never said.
  void lie(std::size_t from, std::size_t to, Message message) {
    const Envelope envelope{"g", view_.epoch, std::move(message)};
    machines_[to]->received(now_, view_.members[from].instance, kAccumulateService,
                            {wire::encode(envelope), {}});
    settle();
  }
  // Reductions that begin from now on do not end; unless `held`, they end again.
  void hold_reductions(bool held = true) { reduces_ = !held; }
  std::size_t reductions() const { return reductions_; }
  void give_state(const Buffer& bytes) {
    wire::Payload state;
    state.body = bytes;
    machines_[0]->set_state(now_, std::move(state));
    settle();
  }
  // Given, and all of it passed on.
  void transfer_state(const Buffer& bytes) {
    give_state(bytes);
    while (transfer()) {
    }
  }

 private:
  struct Mail {
    std::size_t from;
    Send send;
  };

  bool carry_out(std::size_t index) {
    const auto actions = machines_[index]->take_actions();
    for (const Action& action : actions) {
      if (const auto* send = std::get_if<Send>(&action)) {
        const bool transfer = send->service == kSnapshotService;
        if (transfer && send->payload.parts.size() == 1) ++chunks_sent_[index];
        (transfer ? transfers_ : mail_).push_back({index, *send});
      } else if (const auto* reduce = std::get_if<Reduce>(&action)) {
        ++reductions_;
        if (!reduces_ || !reduce->written.reaches(kBucketBytes)) continue;
        machines_[index]->reduced(now_, reduce->epoch, reduce->round,
                                  HeapAllocator().allocate(kBucketBytes));
      } else if (const auto* log = std::get_if<Log>(&action)) {
        if (log->level == LogLevel::warning) ++warnings_;
      } else if (const auto* failed = std::get_if<Failed>(&action)) {
        failures_[index] = failed->error.message;
      } else if (std::holds_alternative<Demote>(action)) {
        ++demotions_;
      }
    }
    return !actions.empty();
  }
  void deliver(const Mail& mail) {
    if (mail.send.service == kAccumulateService) {
      const auto envelope = wire::decode<Envelope>(mail.send.payload.body);
      if (std::holds_alternative<SnapshotOver>(envelope.message)) ++snapshots_over_;
      if (const auto* ready = std::get_if<SnapshotReady>(&envelope.message)) {
        described_ = ready->info;
      }
    }
    for (std::size_t to = 0; to < size(); ++to) {
      if (view_.members[to].instance != mail.send.instance) continue;
      machines_[to]->received(now_, view_.members[mail.from].instance, mail.send.service,
                              mail.send.payload);
    }
  }

  Time now_ = Time(seconds(1));
  group::View view_;
  std::vector<std::unique_ptr<Machine>> machines_;
  std::deque<Mail> mail_;
  std::deque<Mail> transfers_;
  std::map<std::size_t, std::size_t> chunks_sent_;
  std::map<std::size_t, std::string> failures_;
  std::size_t demotions_ = 0;
  std::size_t warnings_ = 0;
  SnapshotInfo described_;
  std::size_t snapshots_over_ = 0;
  std::size_t reductions_ = 0;
  bool reduces_ = true;
};

inline Buffer state_bytes() {
  const MutableBuffer state = HeapAllocator().allocate(kChunks * kChunk);
  for (std::size_t i = 0; i < state.size(); ++i) {
    state.data()[i] = static_cast<std::byte>(i * 7 + i / kChunk);
  }
  return state;
}

}  // namespace moolink::accumulate
