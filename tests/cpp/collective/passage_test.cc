#include "collective/passage.h"

#include <algorithm>
#include <vector>

#include "check.h"

namespace passage_test {

using namespace moolink::collective;

constexpr Kind kKinds[] = {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather,
                           Kind::broadcast,  Kind::gather,         Kind::scatter};

// The ranks' inputs and outputs of one passage, of bytes that tell where they come from. What is
// "reduced" is the exclusive or of all parts.
struct Outcome {
  explicit Outcome(const Passage& of) : passage(of) {
    for (std::uint32_t rank = 0; rank < of.ranks; ++rank) {
      std::vector<std::uint8_t> input(input_bytes(of, rank));
      for (std::size_t i = 0; i < input.size(); ++i) {
        input[i] = static_cast<std::uint8_t>(31 * rank + 7 * i + i / 256 + 1);
      }
      inputs.push_back(input);
      outputs.emplace_back(output_bytes(of, rank));
      written.emplace_back(output_bytes(of, rank));
    }
  }

  void put(std::uint32_t rank, std::uint64_t at, const std::uint8_t* from, std::uint64_t bytes) {
    for (std::uint64_t i = 0; i < bytes; ++i) {
      outputs[rank].at(at + i) = from[i];
      ++written[rank].at(at + i);
    }
  }

  void check() const {
    const std::uint64_t block = passage.count * passage.item_size;
    for (std::uint32_t rank = 0; rank < passage.ranks; ++rank) {
      for (std::uint64_t i = 0; i < outputs[rank].size(); ++i) {
        CHECK_EQ(int{written[rank][i]}, 1);
        std::uint8_t wanted = 0;
        const bool part = passage.kind == Kind::reduce_scatter || passage.kind == Kind::scatter;
        const std::uint64_t at = part ? rank * block + i : i % std::max<std::uint64_t>(1, block);
        if (reduces(passage.kind)) {
          for (const auto& input : inputs) wanted = static_cast<std::uint8_t>(wanted ^ input[at]);
        } else {
          wanted = inputs[has_root(passage.kind) && passage.kind != Kind::gather ? passage.root
                                                                                 : i / block][at];
        }
        CHECK_EQ(int{outputs[rank][i]}, int{wanted});
      }
    }
  }

  Passage passage;
  std::vector<std::vector<std::uint8_t>> inputs;
  std::vector<std::vector<std::uint8_t>> outputs;
  std::vector<std::vector<std::uint8_t>> written;
};

// Every rank does its part of a chunk when all have done the stage before.
void pass_chunk(Outcome& outcome, std::uint64_t window_bytes, std::uint64_t chunk) {
  const Passage& passage = outcome.passage;
  std::vector<std::vector<std::uint8_t>> windows(passage.ranks,
                                                 std::vector<std::uint8_t>(window_bytes));
  std::vector<ChunkPlan> plans;
  for (std::uint32_t rank = 0; rank < passage.ranks; ++rank) {
    plans.push_back(chunk_plan(passage, window_bytes, rank, chunk));
    for (const Move& move : plans[rank].puts) {
      CHECK(move.window + move.bytes <= window_bytes);
      for (std::uint64_t i = 0; i < move.bytes; ++i) {
        windows[rank].at(move.window + i) = outcome.inputs[rank].at(move.user + i);
      }
    }
  }
  for (std::uint32_t rank = 0; rank < passage.ranks; ++rank) {
    const Move& slice = plans[rank].reduced;
    std::vector<std::uint8_t> sum(slice.bytes);
    for (std::uint32_t from = 0; from < passage.ranks; ++from) {
      for (std::uint64_t i = 0; i < slice.bytes; ++i) {
        sum[i] ^= from == rank ? outcome.inputs[rank].at(slice.user + i)
                               : windows[from].at(slice.window + i);
      }
    }
    outcome.put(rank, plans[rank].placed, sum.data(), sum.size());
    if (!plans[rank].passed_on) continue;
    for (std::uint64_t i = 0; i < sum.size(); ++i) windows[rank].at(slice.window + i) = sum[i];
  }
  for (std::uint32_t rank = 0; rank < passage.ranks; ++rank) {
    for (const Move& move : plans[rank].takes) {
      outcome.put(rank, move.user, windows[move.rank].data() + move.window, move.bytes);
    }
    for (const Move& move : plans[rank].own) {
      outcome.put(rank, move.user, outcome.inputs[rank].data() + move.window, move.bytes);
    }
  }
}

template <class Check>
void for_passages(const Check& check) {
  for (const Kind kind : kKinds) {
    for (std::uint32_t ranks = 1; ranks <= 7; ++ranks) {
      for (const std::uint64_t count : {0u, 1u, 3u, 16u, 17u, 500u, 1029u}) {
        for (const std::uint64_t item : {1u, 4u, 16u}) {
          check(Passage{kind, (ranks - 1) / 2, ranks, item, count});
        }
      }
    }
  }
}

TEST("the chunks of a passage move every byte to its place, once") {
  for_passages([](const Passage& passage) {
    for (const std::uint64_t window : {64u * 7, 4096u}) {
      Outcome outcome(passage);
      const std::uint64_t chunks = chunks_of(passage, window);
      CHECK(chunks >= 1);
      for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) pass_chunk(outcome, window, chunk);
      outcome.check();
    }
  });
}

TEST("the messages of a passage move every byte to its place, once") {
  for_passages([](const Passage& passage) {
    Outcome outcome(passage);
    if (passage.kind == Kind::all_reduce) return;  // engine_test.cc has its second half
    for (std::uint32_t to = 0; to < passage.ranks; ++to) {
      std::vector<std::uint8_t> sum;
      for (std::uint32_t from = 0; from < passage.ranks; ++from) {
        const Range sent = sent_bytes(passage, from, to);
        const Range placed = placed_bytes(passage, from, to);
        CHECK_EQ(sent.count(), placed.count());
        if (!passes(passage, from, to)) CHECK(sent.empty());
        if (sent.empty()) continue;
        const std::uint8_t* bytes = outcome.inputs[from].data() + sent.begin;
        if (!reduces(passage.kind)) {
          outcome.put(to, placed.begin, bytes, sent.count());
          continue;
        }
        sum.resize(sent.count());
        for (std::uint64_t i = 0; i < sum.size(); ++i) sum[i] ^= bytes[i];
      }
      if (reduces(passage.kind)) outcome.put(to, 0, sum.data(), sum.size());
    }
    outcome.check();
  });
}

TEST("chunks are short while there would be few, and as long as windows allow otherwise") {
  const std::uint64_t window = 256 << 10;
  CHECK_EQ(chunks_of({Kind::all_reduce, 0, 2, 4, 1 << 12}, window), std::uint64_t{1});
  CHECK_EQ(chunks_of({Kind::all_reduce, 0, 2, 4, 1 << 16}, window), std::uint64_t{4});
  CHECK_EQ(chunks_of({Kind::all_reduce, 0, 2, 4, 1 << 24}, window), std::uint64_t{256});
  CHECK_EQ(chunks_of({Kind::scatter, 0, 4, 4, 1 << 20}, window), std::uint64_t{64});
}

TEST("even slices cover every element once, in order, and are cut at cache lines") {
  for (const std::size_t item : {1u, 2u, 4u, 8u, 16u}) {
    for (std::size_t owners = 1; owners <= 9; ++owners) {
      for (const std::uint64_t count : {0u, 1u, 63u, 64u, 1000u, 4097u, 65536u, 1000003u}) {
        std::uint64_t at = 0;
        for (const Range& range : even_slices(count, item, owners)) {
          CHECK_EQ(range.begin, at);
          CHECK(range.end >= range.begin);
          at = range.end;
        }
        CHECK_EQ(at, count);
      }
    }
  }
  for (const Range& range : even_slices(1000000, 4, 3)) {
    CHECK_EQ(range.begin % 16, std::uint64_t{0});
    CHECK(range.count() > 333000 && range.count() < 333400);
  }
}

}  // namespace passage_test
