#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "tensor/dtype.h"
#include "tensor/layout.h"

namespace {

using namespace moolink;
using tensor::DType;
using tensor::Shape;

TEST("dtype: names and DLPack codes lead back to the type") {
  for (std::size_t i = 0; i < tensor::kDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    CHECK(tensor::from_dlpack(tensor::to_dlpack(dtype)) == dtype);
    CHECK(tensor::dtype_from_name(tensor::dtype_name(dtype)) == dtype);
    CHECK(tensor::item_size(dtype) >= 1);
  }
}

TEST("dtype: what has no whole bytes or several lanes is not a dtype") {
  CHECK(!tensor::from_dlpack({0, 4, 1}));
  CHECK(!tensor::from_dlpack({2, 32, 4}));
  CHECK(!tensor::from_dlpack({17, 4, 1}));
  CHECK(!tensor::dtype_from_name("object"));
}

TEST("dtype: what is refused has a name") {
  CHECK_EQ(tensor::dlpack_name({0, 4, 1}), "int4");
  CHECK_EQ(tensor::dlpack_name({6, 8, 1}), "bool");
  CHECK_EQ(tensor::dlpack_name({2, 32, 4}), "float32 x4");
  CHECK_EQ(tensor::dlpack_name({17, 4, 2}), "float4_e2m1fn x2");
  CHECK_EQ(tensor::dlpack_name({99, 8, 1}), "DLPack code 99, 8 bits");
}

TEST("dtype: classes") {
  CHECK(tensor::is_floating(DType::bfloat16) && tensor::is_floating(DType::float8_e5m2));
  CHECK(!tensor::is_floating(DType::complex64) && tensor::is_complex(DType::complex64));
  CHECK(!tensor::is_floating(DType::boolean) && !tensor::is_native_to_numpy(DType::bfloat16));
  CHECK_EQ(tensor::item_size(DType::complex128), 16U);
}

TEST("layout: sizes are computed without overflow") {
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  CHECK(tensor::byte_size(4, Shape{}) == 4U);
  CHECK(tensor::byte_size(4, Shape{3, 5}) == 60U);
  CHECK(tensor::byte_size(4, Shape{3, 0}) == 0U);
  CHECK(!tensor::byte_size(4, Shape{huge}));
  CHECK(!tensor::byte_size(1, Shape{huge, 2}));
  CHECK(!tensor::byte_size(8, Shape{0, huge}));
  CHECK(!tensor::byte_size(1, Shape{-1}));
  CHECK(!tensor::byte_size(1, Shape(65, 1)));
}

TEST("layout: contiguity ignores strides that are never walked") {
  CHECK(tensor::is_contiguous(Shape{}, Shape{}));
  CHECK(tensor::is_contiguous(Shape{3, 4}, Shape{4, 1}));
  CHECK(!tensor::is_contiguous(Shape{3, 4}, Shape{1, 3}));
  CHECK(tensor::is_contiguous(Shape{1, 4}, Shape{999, 1}));
  CHECK(tensor::is_contiguous(Shape{3, 0}, Shape{7, 7}));
  CHECK(!tensor::is_contiguous(Shape{3, 2}, Shape{0, 1}));
  CHECK(tensor::contiguous_strides(Shape{2, 3, 4}) == (Shape{12, 4, 1}));
}

// Element by element from the definition of strides: what gather must equal.
std::vector<std::byte> gather_slowly(const std::byte* data, std::size_t item, const Shape& shape,
                                     const Shape& strides) {
  std::vector<std::byte> out;
  const std::uint64_t count = *tensor::element_count(shape);
  for (std::uint64_t flat = 0; flat < count; ++flat) {
    std::uint64_t rest = flat;
    std::int64_t offset = 0;
    for (std::size_t i = shape.size(); i-- > 0;) {
      const auto size = static_cast<std::uint64_t>(shape[i]);
      offset += static_cast<std::int64_t>(rest % size) * strides[i];
      rest /= size;
    }
    const std::byte* from = data + offset * static_cast<std::int64_t>(item);
    out.insert(out.end(), from, from + item);
  }
  return out;
}

TEST("layout: gather equals the definition for random shapes, strides and item sizes") {
  Random random(7);
  std::vector<std::byte> memory(1 << 16);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random.next());
  const std::byte* middle = memory.data() + memory.size() / 2;
  constexpr std::size_t kItems[] = {1, 2, 4, 8, 16, 12};
  for (int round = 0; round < 3000; ++round) {
    const std::size_t item = kItems[random.below(6)];
    Shape shape(random.below(5));
    Shape strides(shape.size());
    for (std::size_t i = 0; i < shape.size(); ++i) {
      shape[i] = static_cast<std::int64_t>(random.below(6));
      strides[i] = static_cast<std::int64_t>(random.below(101)) - 50;
    }
    if (random.chance(1, 3)) strides = tensor::contiguous_strides(shape);
    if (shape.size() > 1 && random.chance(1, 4)) {
      std::swap(shape[0], shape[1]);
      std::swap(strides[0], strides[1]);
    }
    const auto expected = gather_slowly(middle, item, shape, strides);
    std::vector<std::byte> out(expected.size() + 1, std::byte{0x5a});
    tensor::gather(middle, item, shape, strides, out.data());
    CHECK(std::equal(expected.begin(), expected.end(), out.begin()));
    CHECK(out.back() == std::byte{0x5a});
  }
}

TEST("layout: texts") {
  CHECK_EQ(tensor::shape_text(Shape{}), "()");
  CHECK_EQ(tensor::shape_text(Shape{3}), "(3,)");
  CHECK_EQ(tensor::shape_text(Shape{3, 4}), "(3, 4)");
  CHECK_EQ((tensor::Device{2, 1}).name(), "cuda:1");
}

}  // namespace
