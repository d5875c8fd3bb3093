// Every collective, over messages and through shared memory.

#include <vector>

#include "collective/members.h"

namespace collectives_test {

using namespace moolink;
using namespace moolink::collective;

constexpr Kind kKinds[] = {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather,
                           Kind::broadcast,  Kind::gather,         Kind::scatter};

struct Collective {
  Collective(Kind kind, std::uint32_t root, std::size_t members, std::int64_t count) {
    spec = floats(count);
    spec.kind = kind;
    spec.root = has_root(kind) ? root : 0;
    passage = spec.passage(members);
    for (std::uint32_t rank = 0; rank < members; ++rank) {
      std::vector<float> input(input_bytes(passage, rank) / 4);
      for (std::size_t i = 0; i < input.size(); ++i) {
        input[i] = static_cast<float>(31 * rank + i % 97);  // exact sums in any order
      }
      inputs.push_back(buffer(input));
      outputs.push_back(HeapAllocator().allocate(output_bytes(passage, rank)));
    }
  }

  OpId start(Members& members, std::uint32_t rank, const std::string& name) const {
    Engine::Options options;
    options.output = outputs[rank];
    options.lent = true;
    return members.start(rank, name, spec, {inputs[rank]}, options);
  }

  std::vector<float> expected(std::uint32_t rank) const {
    const std::size_t count = passage.count;
    std::vector<float> result;
    const auto add = [&](std::uint32_t from, std::size_t at) {
      const auto part = values_of<float>(inputs[from]);
      result.insert(result.end(), part.begin() + static_cast<std::ptrdiff_t>(at),
                    part.begin() + static_cast<std::ptrdiff_t>(at + count));
    };
    const bool part = spec.kind == Kind::reduce_scatter || spec.kind == Kind::scatter;
    const std::size_t at = part ? rank * count : 0;
    if (reduces(spec.kind)) {
      add(0, at);
      for (std::uint32_t from = 1; from < passage.ranks; ++from) {
        const auto next = values_of<float>(inputs[from]);
        for (std::size_t i = 0; i < count; ++i) result[i] += next[at + i];
      }
    } else if (spec.kind == Kind::all_gather || spec.kind == Kind::gather) {
      if (spec.kind == Kind::gather && rank != spec.root) return {};
      for (std::uint32_t from = 0; from < passage.ranks; ++from) add(from, 0);
    } else {
      add(spec.root, at);
    }
    return result;
  }

  OpSpec spec;
  Passage passage;
  std::vector<Buffer> inputs;
  std::vector<MutableBuffer> outputs;
};

TEST("every collective, over messages and through shared memory, for any number of members") {
  for (const bool shared : {false, true}) {
    for (std::uint32_t k = 1; k <= 5; ++k) {
      for (const std::int64_t count : {0, 1, 300, 20011}) {
        Members members(k, 100 * k + static_cast<std::uint64_t>(count));
        if (shared) {
          members.on_one_host();
          members.enter(2);
          members.share_memory();
        }
        std::vector<Collective> collectives;
        for (const Kind kind : kKinds) collectives.emplace_back(kind, k / 2, k, count);
        for (std::uint32_t rank = 0; rank < k; ++rank) {
          for (std::size_t n = 0; n < collectives.size(); ++n) {
            const std::size_t which = (n + rank) % collectives.size();  // in any order
            collectives[which].start(members, rank, kind_name(kKinds[which]));
            members.settle(3);
          }
        }
        members.settle();
        CHECK_EQ(members.passed() != 0, shared);
        for (const Collective& collective : collectives) {
          for (std::uint32_t rank = 0; rank < k; ++rank) {
            CHECK(values_of<float>(collective.outputs[rank]) == collective.expected(rank));
          }
        }
        for (std::uint32_t rank = 0; rank < k; ++rank) {
          CHECK_EQ(members.engine(rank).pending(), std::size_t{0});
          for (OpId id = 1; id <= collectives.size(); ++id) {
            CHECK(members.done(rank, id) != nullptr && !members.done(rank, id)->error);
          }
        }
      }
    }
  }
}

TEST("what a member gives up at any moment ends at all, and holds up nothing that follows") {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    constexpr std::uint32_t kMembers = 3;
    Random random(seed);
    Members members(kMembers, seed);
    members.on_one_host();
    members.enter(2);
    if (random.chance(3, 4)) members.share_memory();
    std::vector<Collective> collectives;
    for (std::size_t n = 0; n < 4; ++n) {
      collectives.emplace_back(n == 3 ? Kind::all_reduce : kKinds[random.below(6)], 1, kMembers,
                               20000);
    }
    const auto who = static_cast<std::uint32_t>(random.below(kMembers));
    const std::size_t which = random.below(3);
    const std::size_t when = random.below(60);
    std::map<std::pair<std::uint32_t, std::size_t>, OpId> ids;
    for (std::size_t n = 0; n < collectives.size(); ++n) {
      for (std::uint32_t rank = 0; rank < kMembers; ++rank) {
        ids[{rank, n}] = collectives[n].start(members, rank, "x" + std::to_string(n));
      }
      if (n == which) {
        members.settle(when);
        members.cancel(who, ids[{who, n}], make_error(ErrorCode::cancelled, "given up"));
      }
      members.settle(random.below(4));
    }
    members.settle();
    for (std::size_t n = 0; n < collectives.size(); ++n) {
      for (std::uint32_t rank = 0; rank < kMembers; ++rank) {
        const auto* done = members.done(rank, ids[{rank, n}]);
        CHECK(done != nullptr);
        if (done == nullptr) continue;
        if (done->error) {
          CHECK(n == which && done->error.code == ErrorCode::cancelled);
        } else {
          CHECK(values_of<float>(collectives[n].outputs[rank]) == collectives[n].expected(rank));
        }
      }
    }
  }
}

TEST("collectives that differ fail at all and name both, also in shared memory") {
  for (const bool shared : {false, true}) {
    Members members(3);
    members.on_one_host();
    members.enter(2);
    if (shared) members.share_memory();
    const Collective one(Kind::broadcast, 0, 3, 50000);
    const Collective other(Kind::broadcast, 1, 3, 50000);
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      (rank == 2 ? other : one).start(members, rank, "x");
    }
    members.settle();
    const Collective next(Kind::all_reduce, 0, 3, 50000);
    for (std::uint32_t rank = 0; rank < 3; ++rank) next.start(members, rank, "x");
    members.settle();
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      const auto* done = members.done(rank, 1);
      CHECK(done != nullptr && done->error.message.find("root 1") != std::string::npos &&
            done->error.message.find("peer-2") != std::string::npos);
      CHECK(values_of<float>(next.outputs[rank]) == next.expected(rank));
    }
  }
}

TEST("a change of epoch ends what passes through shared memory, or begins it again") {
  Members members(2);
  members.on_one_host();
  members.enter(2);
  members.share_memory();
  const Collective lost(Kind::all_reduce, 0, 2, 50000);
  const Collective kept(Kind::all_reduce, 0, 2, 50000);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    lost.start(members, rank, "lost");
    Engine::Options retry;
    retry.retry = true;
    retry.output = kept.outputs[rank];
    members.start(rank, "kept", kept.spec, {kept.inputs[rank]}, retry);
  }
  members.settle(8);
  members.drop_messages();
  members.enter(3);
  members.share_memory();
  members.settle();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    CHECK(members.done(rank, 1)->error.code == ErrorCode::group_changed);
    CHECK(values_of<float>(kept.outputs[rank]) == kept.expected(rank));
  }
}

}  // namespace collectives_test
