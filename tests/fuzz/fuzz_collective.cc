// Engines of one group with collectives under way, whose messages are lost, repeated, given to
// others, bent and made up. Nothing is thrown but for malformed bytes, every operation ends at most
// once, and results have the size that was asked for.

#include <optional>
#include <set>

#include "collective/engine.h"
#include "mail.h"
#include "target.h"

namespace moolink::fuzz {
namespace {

using namespace moolink::collective;

constexpr std::size_t kMembers = 4;
constexpr std::size_t kEarly = std::size_t{256} << 10;

Uid id_of(std::size_t member) { return {1, member + 1}; }

class World {
 public:
  explicit World(Input& input) {
    const std::size_t hosts = 1 + input.below(3);
    const std::size_t count = 2 + input.below(kMembers - 1);
    for (std::size_t i = 0; i < count; ++i) {
      members_.push_back({id_of(i), "p" + std::to_string(i), {2, i % hosts}});
      Engine::Config config;
      config.scope = "g";
      config.self = id_of(i);
      config.early_bytes = kEarly;
      engines_.emplace_back(config);
    }
    enter();
  }

  void act(Input& input) {
    const std::size_t who = input.below(engines_.size());
    switch (input.below(12)) {
      case 0:
      case 1:
      case 2:
        return start(input, who);
      case 3:
      case 4:
        for (const Letter& letter : std::exchange(due_, {})) deliver(letter);
        return;
      case 5:
        if (input.byte() == 0) enter();
        return;
      case 6:
        if (started_.empty() || input.byte() != 0) return;
        engines_[who].cancel(*started_.begin(), make_error(ErrorCode::cancelled, "enough"));
        return;
      case 7:
        return deliver({id_of(input.below(kMembers + 1)), who, as_buffer(input.bytes()), {}});
      default: {
        if (mail_.empty()) return;
        Letter letter = mail_.pick(input);
        Bytes bytes = copy_of(letter.body);
        if (input.chance()) bend(input, bytes);
        letter.body = as_buffer(std::move(bytes));
        if (input.byte() == 1) letter.from = id_of(input.below(kMembers + 1));
        if (input.byte() == 1) letter.parts.clear();
        if (input.byte() == 1) letter.parts.push_back(as_buffer(Bytes(input.byte() * 8U)));
        if (input.byte() == 1) letter.to = who;
        deliver(letter);
      }
    }
  }

  void drain() {
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      for (auto actions = engines_[i].take_actions(); !actions.empty();
           actions = engines_[i].take_actions()) {
        for (Engine::Action& action : actions) carry_out(i, action);
      }
    }
  }

 private:
  struct Letter {
    Uid from;
    std::size_t to;
    Buffer body;
    std::vector<Buffer> parts;
  };

  void enter() {
    const auto members = std::make_shared<const EpochMembers>(++epoch_, members_);
    for (Engine& engine : engines_) {
      engine.set_members(members, make_error(ErrorCode::group_changed, "another epoch"));
    }
  }

  void start(Input& input, std::size_t who) {
    const std::string name(1, static_cast<char>('a' + input.below(3)));
    if (input.below(5) == 4) {
      started_.insert(engines_[who].start_value(name, {as_buffer(Bytes(input.byte())), {}}, {}));
      return;
    }
    OpSpec spec;
    spec.kind = static_cast<Kind>(input.below(6));
    spec.root = static_cast<std::uint32_t>(input.below(kMembers));
    spec.dtype = input.chance() ? tensor::DType::float32 : tensor::DType::bfloat16;
    spec.op = static_cast<ReduceOp>(input.below(5));
    spec.shape = {static_cast<std::int64_t>(input.byte()) * (input.chance() ? 1 : 100)};
    if (input.byte() == 1) spec.compression = Compression::bf16;
    refused(
        [&] {
          const std::size_t bytes =
              input_bytes(spec.passage(engines_.size()), static_cast<std::uint32_t>(who));
          started_.insert(engines_[who].start(name, spec, {as_buffer(Bytes(bytes))}, {}));
        },
        {ErrorCode::invalid_argument});
  }

  void carry_out(std::size_t from, Engine::Action& action) {
    if (auto* send = std::get_if<Engine::Send>(&action)) {
      for (std::size_t to = 0; to < engines_.size(); ++to) {
        if (send->instance != id_of(to)) continue;
        due_.push_back({id_of(from), to, send->payload.body, send->payload.parts});
        mail_.post(due_.back());
      }
    } else if (auto* sum = std::get_if<Engine::Sum>(&action)) {
      collective::run(sum->work);
      engines_[from].summed(sum->op, sum->run, sum->id);
    } else if (auto* combine = std::get_if<Engine::Combine>(&action)) {
      engines_[from].combined(combine->op, combine->run, std::move(combine->payloads.front()));
    } else if (const auto* done = std::get_if<Engine::Done>(&action)) {
      FUZZ_CHECK(ended_.emplace(from, done->op).second);
    }
  }

  void deliver(const Letter& letter) {
    refused([&] {
      const wire::Payload payload{letter.body, letter.parts};
      if (wire::Reader(payload.body).text() != "g") return;
      engines_[letter.to].received(letter.from, payload);
      drain();
    });
  }

  std::vector<EpochMembers::Member> members_;
  std::uint64_t epoch_ = 0;
  std::vector<Engine> engines_;
  std::set<OpId> started_;
  std::set<std::pair<std::size_t, OpId>> ended_;
  std::vector<Letter> due_;
  Mail<Letter> mail_;
};

}  // namespace

void run(Input input) {
  World world(input);
  drive(world, input);
}

std::vector<Bytes> seeds() {
  std::vector<Bytes> all;
  for (std::uint64_t hosts = 0; hosts < 3; ++hosts) {
    for (std::uint64_t kind = 0; kind < 6; ++kind) {
      Output output;
      output.byte(hosts).byte(1 + kind % 3);
      for (std::uint64_t round = 0; round < 4; ++round) {
        for (std::uint64_t who = 0; who < 2 + (1 + kind % 3) % 3; ++who) {
          output.byte(who).byte(0).byte(round).byte(round == 3 ? 4 : 0);
          if (round == 3) {
            output.byte(20);
            continue;
          }
          output.byte(kind).byte(0).byte(1).byte(round).byte(40).byte(round).byte(hosts);
        }
        for (int turn = 0; turn < 4; ++turn) output.byte(0).byte(3);
        output.byte(1).byte(9).byte(round).byte(1).byte(1).number(9 + round).byte(0).byte(200);
        output.byte(0).byte(0).byte(0).byte(0);
      }
      all.push_back(output.take());
    }
  }
  return all;
}

}  // namespace moolink::fuzz
