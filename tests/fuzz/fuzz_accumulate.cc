// Accumulators of one group, whose messages are lost, repeated, given to others, bent and made up.
// Whatever they are told: no error but that of malformed bytes, and rounds come in order.

#include <optional>

#include "accumulate/machine.h"
#include "mail.h"
#include "target.h"

namespace moolink::fuzz {
namespace {

using namespace moolink::accumulate;

constexpr std::size_t kMembers = 3;
constexpr std::size_t kBucket = 16;
constexpr std::size_t kMostHeld = std::size_t{4} << 20;

Uid id_of(std::size_t member) { return {1, member + 1}; }

class World {
 public:
  World() {
    view_.epoch = 1;
    view_.lineage = {5, 5};
    for (std::size_t i = 0; i < kMembers; ++i) {
      Config config;
      config.group = "g";
      config.instance = id_of(i);
      config.name = "p" + std::to_string(i);
      config.bucket_bytes = kBucket;
      config.chunk_bytes = 64;
      config.backlog_bytes = 20 * kBucket;
      config.memory = memory_;
      machines_[i].emplace(config);
      view_.members.push_back({id_of(i), config.name, 0, {9, 9}, group::Role::member, 0});
    }
    machines_[0]->set_model_version(7);
    for (auto& machine : machines_) machine->view(now_, std::make_shared<const group::View>(view_));
    drain();
  }

  void act(Input& input) {
    const std::size_t who = input.below(kMembers);
    Machine& machine = *machines_[who];
    switch (input.below(12)) {
      case 0:
        return pass(milliseconds(4 * input.byte()));
      case 1:
        return use(machine, input);
      case 2:
        return offer(machine, input.below(4));
      case 3:
        return change_view(input);
      case 4:
        if (input.byte() == 0) machine.evicted(now_);
        return;
      case 5:
        machine.checksum(now_, input.number(), input.number());
        return;
      case 6:
        if (input.byte() == 0) machine.resync(now_);
        return;
      case 7: {
        wire::Payload payload{as_buffer(input.bytes()), {}};
        if (input.chance()) payload.parts.push_back(as_buffer(Bytes(input.byte())));
        return deliver({id_of(input.below(kMembers + 1)), who,
                        input.chance() ? kSnapshotService : kAccumulateService, payload});
      }
      default: {
        if (mail_.empty()) return;
        Letter letter = mail_.pick(input);
        Bytes bytes = copy_of(letter.payload.body);
        if (input.chance()) bend(input, bytes);
        letter.payload.body = as_buffer(std::move(bytes));
        if (input.byte() == 1) letter.from = id_of(input.below(kMembers + 1));
        if (input.byte() == 1) letter.payload.parts.clear();
        if (input.byte() == 1) letter.to = who;
        deliver(letter);
      }
    }
  }

  void drain() {
    for (bool acted = true; acted;) {
      acted = false;
      for (std::size_t i = 0; i < kMembers; ++i) {
        for (Action& action : machines_[i]->take_actions()) {
          carry_out(i, action);
          acted = true;
        }
      }
    }
    FUZZ_CHECK(memory_->held() <= kMostHeld);
  }

 private:
  struct Letter {
    Uid from;
    std::size_t to;
    std::uint8_t service;
    wire::Payload payload;
  };

  void carry_out(std::size_t from, Action& action) {
    if (auto* send = std::get_if<Send>(&action)) {
      for (std::size_t to = 0; to < kMembers; ++to) {
        if (send->instance != id_of(to)) continue;
        mail_.post({id_of(from), to, send->service, send->payload});
        due_.push_back({id_of(from), to, send->service, std::move(send->payload)});
      }
    } else if (const auto* reduce = std::get_if<Reduce>(&action)) {
      for (const Buffer& input : reduce->inputs) FUZZ_CHECK(input.size() == kBucket);
      machines_[from]->reduced(now_, reduce->epoch, reduce->round,
                               HeapAllocator().allocate(kBucket));
    }
  }

  // Every fourth is a skip, which has no bucket.
  void offer(Machine& machine, std::size_t batch) {
    if (!machine.wants_gradients(now_)) return;
    Buffer bucket;
    if (batch > 0) bucket = HeapAllocator().allocate(kBucket);
    machine.offer(now_, std::move(bucket), static_cast<std::int64_t>(batch), {{"steps", 1}});
  }

  void pass(Duration duration) {
    for (const Letter& letter : std::exchange(due_, {})) deliver(letter);
    now_ += duration;
    for (auto& machine : machines_) machine->tick(now_);
  }

  void deliver(const Letter& letter) {
    refused([&] {
      if (wire::Reader(letter.payload.body).text() != "g") return;
      machines_[letter.to]->received(now_, letter.from, letter.service, letter.payload);
    });
  }

  void use(Machine& machine, Input& input) {
    machine.user_active(now_);
    if (machine.wants_state()) {
      machine.set_state(now_, {as_buffer(Bytes(input.byte())), {as_buffer(Bytes(100))}});
    } else if (const auto state = machine.new_state()) {
      machine.state_installed(now_, state->number);
    } else if (const auto round = machine.next_result()) {
      FUZZ_CHECK(round->number() == machine.model_version() + 1);
      // After a snapshot of a liar, older than what is here, a result may be gone: it is not shown.
      if (round->result.empty()) return;
      FUZZ_CHECK(round->result.size() == kBucket);
      machine.delivered(now_, round->number());
    }
  }

  void change_view(Input& input) {
    ++view_.epoch;
    view_.soft = input.chance();
    if (input.byte() == 1) view_.lineage = {5, view_.epoch};
    const std::size_t last = input.below(kMembers + 1);
    for (std::size_t i = 0; i < kMembers; ++i) {
      view_.members[i].role = i == last ? group::Role::newcomer : group::Role::member;
    }
    for (auto& machine : machines_) machine->view(now_, std::make_shared<const group::View>(view_));
  }

  Time now_{seconds(1)};
  std::shared_ptr<CountingAllocator> memory_ = std::make_shared<CountingAllocator>(kMostHeld / 4);
  group::View view_;
  std::optional<Machine> machines_[kMembers];
  std::vector<Letter> due_;
  Mail<Letter> mail_;
};

}  // namespace

void run(Input input) {
  World world;
  drive(world, input);
}

std::vector<Bytes> seeds() {
  Output training;
  for (std::uint64_t i = 0; i < 30; ++i) {
    training.byte(0).byte(0).byte(30);
    for (std::uint64_t who = 0; who < kMembers; ++who) {
      training.byte(who).byte(1).byte(50).byte(who).byte(2).byte(1);
    }
  }
  Output changing;
  for (std::uint64_t i = 0; i < 40; ++i) {
    changing.byte(0).byte(0).byte(60).byte(i % 3).byte(1).byte(9).byte(i % 3).byte(2).byte(i);
    changing.byte(1).byte(9).byte(i).byte(1).byte(1).number(3 * i).byte(0).byte(i).byte(0).byte(0);
    changing.byte(0);
    if (i % 10 == 9) changing.byte(0).byte(3).byte(i / 10).byte(0).byte(2);
  }
  Output made_up;
  const auto say = [&](Message message) {
    const Buffer bytes = wire::encode(Envelope{"g", 1, std::move(message)});
    made_up.byte(1).byte(7).bytes(bytes.span()).byte(0).byte(0).byte(0).byte(0).byte(0).byte(9);
  };
  RoundRecord record{8, 1, 1, {{"steps", {0, 1}}}, {{id_of(0), "p0", 1, 1, 7}}};
  say(Offer{1, 1, {{"steps", 1}}, 7});
  say(Cut{record, 0});
  say(Have{8, 8, true});
  say(Stable{8});
  say(Checksum{8, 5});
  say(Diverged{8, {id_of(1)}});
  Flush flush;
  flush.rounds = {{record, true}};
  flush.holds = {{1, 7}};
  say(flush);
  Resume resume;
  resume.leader = id_of(0);
  resume.members = {{id_of(1), StateStatus::complete, {}, ""}};
  resume.rounds = {{record, {id_of(0)}}};
  resume.snapshots = {{{1, 7}, {id_of(0)}}};
  say(resume);
  say(Ready{});
  say(Go{{record.contributions}});
  say(Move{2});
  say(FetchResult{8});
  say(FetchedResult{8});
  say(RequestState{});
  say(SnapshotPromised{{1, 7}});
  say(SnapshotReady{{{1, 7}, 0, 64, {10, 100}, {1, 2, 3}}, {id_of(0)}});
  say(SnapshotComplete{{1, 7}});
  say(SnapshotOver{{1, 7}});
  say(Settings{4, 2});
  return {training.take(), changing.take(), made_up.take()};
}

}  // namespace moolink::fuzz
