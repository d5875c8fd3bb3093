#include "collective/compression.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/random.h"
#include "check.h"

namespace compression_test {

using namespace moolink;
using namespace moolink::collective;

constexpr std::size_t kBlock = 256;

std::vector<float> some_values(std::size_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    value = std::ldexp(static_cast<float>(random.below(1u << 24)) - (1 << 23),
                       static_cast<int>(random.below(12)) - 30);
  }
  return values;
}

// Encodes with feedback into `residual` (none when empty) and decodes.
std::vector<float> there_and_back(Compression compression, const std::vector<float>& values,
                                  std::vector<float>& residual) {
  HeapAllocator heap;
  const std::size_t bytes = values.size() * sizeof(float);
  const MutableBuffer input = heap.allocate(bytes);
  std::memcpy(input.data(), values.data(), bytes);
  MutableBuffer kept;
  if (!residual.empty()) {
    kept = heap.allocate(bytes);
    std::memcpy(kept.data(), residual.data(), bytes);
  }
  const MutableBuffer encoded = heap.allocate(encoded_size(compression, values.size()));
  run(EncodeTask{compression, input, kept, encoded});
  const MutableBuffer output = heap.allocate(bytes);
  const MutableBuffer arrived = heap.allocate(encoded.size() + 1).slice(1, encoded.size());
  if (!encoded.empty()) std::memcpy(arrived.data(), encoded.data(), encoded.size());
  run(DecodeTask{compression, arrived, output});
  if (!residual.empty()) std::memcpy(residual.data(), kept.data(), bytes);
  std::vector<float> result(values.size());
  std::memcpy(result.data(), output.data(), bytes);
  return result;
}

// The greatest error that an element may have.
float bound(Compression compression, const std::vector<float>& values, std::size_t i) {
  if (compression == Compression::bf16) return std::fabs(values[i]) * 0x1p-8f;
  float greatest = 0;
  const std::size_t begin = i / kBlock * kBlock;
  for (std::size_t j = begin; j < std::min(values.size(), begin + kBlock); ++j) {
    greatest = std::max(greatest, std::fabs(values[j]));
  }
  return greatest / 254 * 1.001f;
}

TEST("sizes") {
  CHECK_EQ(encoded_size(Compression::none, 1000), std::size_t{4000});
  CHECK_EQ(encoded_size(Compression::bf16, 1000), std::size_t{2000});
  CHECK_EQ(encoded_size(Compression::int8, 1000), std::size_t{1016});
  CHECK_EQ(encoded_size(Compression::int8, 0), std::size_t{0});
  CHECK(kCompressionNames.find("int8") == Compression::int8);
  CHECK(!kCompressionNames.find("fp8"));
}

TEST("errors are bounded") {
  for (const std::size_t count : {1u, 7u, 255u, 256u, 257u, 5000u}) {
    const std::vector<float> values = some_values(count, count);
    for (const auto compression : {Compression::none, Compression::bf16, Compression::int8}) {
      std::vector<float> none;
      const auto result = there_and_back(compression, values, none);
      for (std::size_t i = 0; i < count; ++i) {
        const float allowed = compression == Compression::none ? 0 : bound(compression, values, i);
        CHECK(std::fabs(result[i] - values[i]) <= allowed);
      }
    }
  }
}

TEST("what is lost is in the residual, exactly") {
  const std::vector<float> values = some_values(1000, 3);
  for (const auto compression : {Compression::bf16, Compression::int8}) {
    std::vector<float> residual(values.size(), 0.0f);
    const auto result = there_and_back(compression, values, residual);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float allowed = std::fabs(values[i]) * 0x1p-22f + std::fabs(residual[i]) * 0x1p-22f;
      CHECK(std::fabs(result[i] + residual[i] - values[i]) <= allowed);
    }
  }
}

TEST("with feedback the mean of many times converges to the value, without it does not") {
  const std::vector<float> values = some_values(600, 4);
  for (const auto compression : {Compression::bf16, Compression::int8}) {
    constexpr int kTimes = 200;
    std::vector<float> residual(values.size(), 0.0f);
    std::vector<float> none;
    std::vector<double> with(values.size());
    std::vector<double> without(values.size());
    for (int time = 0; time < kTimes; ++time) {
      const auto a = there_and_back(compression, values, residual);
      const auto b = there_and_back(compression, values, none);
      for (std::size_t i = 0; i < values.size(); ++i) with[i] += a[i], without[i] += b[i];
    }
    double worst = 0;
    double worst_without = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double scale = bound(compression, values, i);
      if (scale == 0) continue;
      worst = std::max(worst, std::fabs(with[i] / kTimes - values[i]) / scale);
      worst_without = std::max(worst_without, std::fabs(without[i] / kTimes - values[i]) / scale);
    }
    CHECK(worst < 2.5 / kTimes);  // the residual of the last time is all that is missing
    CHECK(worst_without > 0.4);
  }
}

TEST("what is not finite is seen and not carried over") {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {infinity, -infinity, nan}) {
    std::vector<float> values = some_values(600, 5);
    values[300] = bad;
    for (const auto compression : {Compression::bf16, Compression::int8}) {
      std::vector<float> residual(values.size(), 0.25f);
      const auto result = there_and_back(compression, values, residual);
      for (const float left : residual) CHECK(std::isfinite(left));
      CHECK_EQ(residual[300], 0.0f);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const bool in_block = compression == Compression::int8 && i >= 256 && i < 512;
        if (in_block) CHECK(std::isnan(result[i]));
        if (!in_block && i != 300) CHECK(std::isfinite(result[i]));
      }
      if (compression == Compression::bf16) {
        CHECK(std::isnan(bad) ? std::isnan(result[300]) : result[300] == bad);
      }
    }
  }
}

TEST("zeros, denormals and the greatest numbers") {
  const float greatest = std::numeric_limits<float>::max();
  for (const auto compression : {Compression::bf16, Compression::int8}) {
    std::vector<float> residual(4, 0.0f);
    const std::vector<float> tiny(4, std::numeric_limits<float>::denorm_min());
    there_and_back(compression, {0, 0, 0, 0}, residual);
    for (const float left : residual) CHECK_EQ(left, 0.0f);
    const auto small = there_and_back(compression, tiny, residual);
    for (std::size_t i = 0; i < 4; ++i) CHECK_EQ(small[i] + residual[i], tiny[i]);
    std::vector<float> none(4, 0.0f);
    const auto large = there_and_back(compression, {greatest, -greatest, 1, 0}, none);
    for (const float left : none) CHECK(std::isfinite(left));
    if (compression == Compression::int8) CHECK(std::isfinite(large[0]) && large[1] == -large[0]);
  }
}

}  // namespace compression_test
