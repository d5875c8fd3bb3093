#include "wire/value.h"

#include <string>
#include <vector>

#include "check.h"
#include "value_example.h"

namespace value_test {

using namespace moolink;
using wire::ValueReader;
using wire::ValueTag;
using wire::ValueWriter;
using wire::example::bytes_of;

const wire::TypeHead kRecord{"tests:Point", {"x", "y"}};
const wire::TypeHead kColour{"tests:Colour", {}};

TEST("value: every kind of token comes back in order") {
  const wire::Payload payload = wire::example::write_everything(kRecord, kColour);
  ValueReader reader(payload, Limits{});
  const auto expect = [&](ValueTag tag) -> const wire::ValueToken& {
    const wire::ValueToken& token = reader.next();
    CHECK(token.tag == tag);
    return token;
  };
  CHECK_EQ(expect(ValueTag::list).size, 21U);
  expect(ValueTag::none);
  expect(ValueTag::true_);
  expect(ValueTag::false_);
  CHECK_EQ(expect(ValueTag::integer).integer, -12345);
  CHECK_EQ(expect(ValueTag::big_integer).text(), "0123456789");
  CHECK_EQ(expect(ValueTag::real).number.real(), 0.5);
  CHECK(expect(ValueTag::complex).number == std::complex<double>(1, -2));
  CHECK_EQ(expect(ValueTag::string).text(), "text");
  CHECK_EQ(expect(ValueTag::bytes).text(), "bytes");
  CHECK_EQ(expect(ValueTag::bytearray).text(), "array");
  CHECK_EQ(expect(ValueTag::tuple).size, 1U);
  CHECK_EQ(expect(ValueTag::set).size, 1U);
  expect(ValueTag::integer);
  CHECK_EQ(expect(ValueTag::frozenset).size, 0U);
  CHECK_EQ(expect(ValueTag::dict).size, 2U);
  CHECK_EQ(expect(ValueTag::string).text(), "key");
  CHECK_EQ(expect(ValueTag::list).size, 0U);
  expect(ValueTag::integer);
  expect(ValueTag::none);
  const std::size_t record = expect(ValueTag::record).type;
  CHECK_EQ(reader.types()[record].name, kRecord.name);
  CHECK(reader.types()[record].fields == kRecord.fields);
  expect(ValueTag::integer);
  CHECK_EQ(expect(ValueTag::record).type, record);
  expect(ValueTag::none);
  expect(ValueTag::none);
  const wire::ValueToken member = expect(ValueTag::member);
  CHECK_EQ(reader.types()[member.type].name, kColour.name);
  CHECK_EQ(member.text(), "red");
  CHECK_EQ(expect(ValueTag::flags).type, member.type);
  expect(ValueTag::integer);
  CHECK_EQ(expect(ValueTag::scalar).text(), "abcd");
  CHECK(reader.tensor().dtype == tensor::DType::float32);
  CHECK_EQ(expect(ValueTag::tensor).text(), "abcdefgh");
  CHECK(reader.tensor().framework == wire::Framework::torch);
  CHECK(reader.tensor().shape == (tensor::Shape{2, 2}));
  CHECK(!reader.tensor().device);
  CHECK_EQ(expect(ValueTag::tensor).text(), "xyz");
  CHECK(reader.tensor().framework == wire::Framework::cupy);
  CHECK(reader.tensor().device == 2U);
  expect(ValueTag::convert);
  CHECK_EQ(expect(ValueTag::tensor).part, 0U);
  CHECK_EQ(reader.tensor().numpy_type, "<U3");
  CHECK(!reader.tensor().device);
  CHECK_EQ(expect(ValueTag::pickle).text(), "pickle");
  CHECK(reader.done());
  CHECK_THROWS(reader.next(), ErrorCode::wire);
}

TEST("value: a type's name is written once a message") {
  const auto size = [](int records) {
    ValueWriter writer{Limits{}};
    writer.begin(ValueTag::list, static_cast<std::size_t>(records));
    for (int i = 0; i < records; ++i) {
      writer.begin(ValueTag::record, kRecord);
      writer.none();
      writer.none();
    }
    return writer.take().size();
  };
  CHECK_EQ(size(3) - size(2), 4U);
}

void walk(const wire::Payload& payload, const Limits& limits = {}) {
  std::uint64_t checksum = 0;
  wire::example::walk(payload, limits, checksum);
}

TEST("value: every truncation and every extra byte is refused") {
  const wire::Payload good = wire::example::write_everything(kRecord, kColour);
  walk(good);
  for (std::size_t size = 0; size < good.body.size(); ++size) {
    CHECK_THROWS(walk({good.body.slice(0, size), good.parts}), ErrorCode::wire);
  }
  std::vector<std::byte> longer(good.body.data(), good.body.data() + good.body.size());
  longer.push_back(std::byte{0});
  CHECK_THROWS(walk({Buffer(nullptr, longer.data(), longer.size()), good.parts}), ErrorCode::wire);
}

TEST("value: parts must be as many and as large as the tensors say") {
  wire::Payload bad = wire::example::write_everything(kRecord, kColour);
  bad.parts.push_back(wire::example::zeros(1));
  CHECK_THROWS(walk(bad), ErrorCode::wire);
  bad.parts.clear();
  CHECK_THROWS(walk(bad), ErrorCode::wire);
  bad.parts = {wire::example::zeros(59)};
  CHECK_THROWS(walk(bad), ErrorCode::wire);
}

wire::Payload nested(std::size_t depth) {
  ValueWriter writer{Limits{}};
  for (std::size_t i = 0; i < depth; ++i) writer.begin(ValueTag::list, 1);
  writer.none();
  return {writer.take(), {}};
}

TEST("value: nesting is allowed up to the limit and refused beyond it") {
  Limits limits;
  limits.max_depth = 20;
  walk(nested(20), limits);
  CHECK_THROWS(walk(nested(21), limits), ErrorCode::wire);
}

TEST("value: containers cannot announce more than the bytes that remain, all together") {
  // Each list alone announces no more than remains; together they would be a hundred times that.
  ValueWriter writer{Limits{}};
  for (int i = 0; i < 100; ++i) writer.begin(ValueTag::list, 1000);
  writer.string(std::string(2000, 'x'));
  CHECK_THROWS(walk({writer.take(), {}}), ErrorCode::wire);
}

TEST("value: a body above the limit is refused at the sender") {
  Limits limits;
  limits.max_body = 1000;
  ValueWriter large{limits};
  CHECK_THROWS(large.string(std::string(1001, 'x')), ErrorCode::invalid_argument);
  ValueWriter many{limits};
  const auto write_many = [&] {
    for (int i = 0; i < 1100; ++i) many.none();
  };
  CHECK_THROWS((write_many(), 0), ErrorCode::invalid_argument);
}

TEST("value: tensors of impossible shapes are refused") {
  for (const tensor::Shape& shape :
       {tensor::Shape{-1}, tensor::Shape{1LL << 40, 1LL << 40}, tensor::Shape(65, 1)}) {
    ValueWriter writer{Limits{}};
    writer.part_tensor({wire::Framework::numpy, tensor::DType::float32, "", shape});
    CHECK_THROWS(walk({writer.take(), {wire::example::zeros(4)}}), ErrorCode::wire);
  }
}

TEST("value: only numpy's own dates and strings have a numpy description") {
  CHECK(wire::numpy_item_size("<M8[ns]") == 8U);
  CHECK(wire::numpy_item_size("<m8[25us]") == 8U);
  CHECK(wire::numpy_item_size("<M8") == 8U);
  CHECK(wire::numpy_item_size("<U12") == 48U);
  CHECK(wire::numpy_item_size("|S3") == 3U);
  CHECK(wire::numpy_item_size("<U0") == 0U);
  CHECK(wire::numpy_item_size("|S0") == 0U);
  for (const char* bad :
       {"|O", "<U00", "|V0", "<U", "<M4[ns]", "<M8[xx]", "<M8[0s]", "<M8[ns", ">U3", "|V8",
        "<U3,i4", "i4,i4", "", "<f4", "<U1234567890", "|S3[ns]", "<M8[]"}) {
    CHECK(!wire::numpy_item_size(bad));
  }
}

}  // namespace value_test
