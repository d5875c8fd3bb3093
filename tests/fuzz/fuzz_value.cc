// Any bytes as a value: it is refused, or what is read is written again and reads the same.

#include <bit>
#include <deque>
#include <optional>

#include "target.h"
#include "tests/cpp/wire/value_example.h"
#include "wire/value.h"

namespace moolink::fuzz {
namespace {

using wire::TensorHead;
using wire::ValueTag;
using wire::ValueToken;
using wire::ValueWriter;

// A token with what it refers to.
struct Step {
  ValueToken token;
  wire::TypeHead type;
  TensorHead tensor;
  Bytes bytes;
};

bool has_type(ValueTag tag) {
  return tag == ValueTag::record || tag == ValueTag::member || tag == ValueTag::flags ||
         tag == ValueTag::convert;
}

std::vector<Step> walk(const wire::Payload& payload, const Limits& limits) {
  std::vector<Step> steps;
  wire::ValueReader reader(payload, limits);
  while (!reader.done()) {
    Step step{reader.next(), {}, reader.tensor(), {}};
    step.bytes.assign(step.token.bytes.begin(), step.token.bytes.end());
    if (has_type(step.token.tag)) step.type = reader.types().at(step.token.type);
    FUZZ_CHECK(step.token.part == wire::kNoPart || step.token.part < payload.parts.size());
    steps.push_back(std::move(step));
  }
  return steps;
}

void write(ValueWriter& writer, const Step& step, std::deque<wire::TypeHead>& types) {
  const ValueToken& token = step.token;
  const std::span<const std::byte> bytes(step.bytes);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (has_type(token.tag)) types.push_back(step.type);
  switch (token.tag) {
    case ValueTag::none:
      return writer.none();
    case ValueTag::false_:
    case ValueTag::true_:
      return writer.boolean(token.tag == ValueTag::true_);
    case ValueTag::integer:
      return writer.integer(token.integer);
    case ValueTag::real:
      return writer.real(token.number.real());
    case ValueTag::complex:
      return writer.complex(token.number);
    case ValueTag::string:
      return writer.string(text);
    case ValueTag::big_integer:
    case ValueTag::bytes:
    case ValueTag::bytearray:
    case ValueTag::pickle:
      return writer.bytes(token.tag, bytes);
    case ValueTag::list:
    case ValueTag::tuple:
    case ValueTag::set:
    case ValueTag::frozenset:
    case ValueTag::dict:
      return writer.begin(token.tag, token.size);
    case ValueTag::member:
      return writer.member(types.back(), text);
    case ValueTag::record:
    case ValueTag::flags:
    case ValueTag::convert:
      return writer.begin(token.tag, types.back());
    case ValueTag::scalar:
      return writer.scalar(step.tensor, bytes);
    case ValueTag::tensor:
      if (token.part == wire::kNoPart) return writer.inline_tensor(step.tensor, bytes);
      return writer.part_tensor(step.tensor);
    case ValueTag::device_tensor:
      FUZZ_CHECK(!"a token is never of this kind");
  }
}

bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

void check_same(const Step& a, const Step& b) {
  FUZZ_CHECK(a.token.tag == b.token.tag && a.token.integer == b.token.integer);
  FUZZ_CHECK(same_bits(a.token.number.real(), b.token.number.real()));
  FUZZ_CHECK(same_bits(a.token.number.imag(), b.token.number.imag()));
  FUZZ_CHECK(a.token.size == b.token.size && a.token.part == b.token.part && a.bytes == b.bytes);
  FUZZ_CHECK(a.type.name == b.type.name && a.type.fields == b.type.fields);
  if (a.token.tag != ValueTag::tensor && a.token.tag != ValueTag::scalar) return;
  FUZZ_CHECK(a.tensor.dtype == b.tensor.dtype && a.tensor.numpy_type == b.tensor.numpy_type);
  if (a.token.tag == ValueTag::scalar) return;
  FUZZ_CHECK(a.tensor.framework == b.tensor.framework && a.tensor.shape == b.tensor.shape);
  FUZZ_CHECK(a.tensor.device == b.tensor.device);
}

}  // namespace

void run(Input input) {
  const Limits limits;
  wire::Payload payload;
  for (std::size_t parts = input.below(4); parts > 0; --parts) {
    payload.parts.push_back(wire::example::zeros(input.byte()));
  }
  payload.body = as_buffer(input.rest());
  std::vector<Step> steps;
  if (refused([&] { steps = walk(payload, limits); })) return;
  // What a peer may make this side hold beside the message is bounded by the message.
  FUZZ_CHECK(steps.size() <= payload.body.size());
  ValueWriter writer(limits);
  std::deque<wire::TypeHead> types;
  for (const Step& step : steps) write(writer, step, types);
  payload.body = writer.take();
  const std::vector<Step> again = walk(payload, limits);
  FUZZ_CHECK(steps.size() == again.size());
  for (std::size_t i = 0; i < steps.size(); ++i) check_same(steps[i], again[i]);
}

std::vector<Bytes> seeds() {
  const wire::TypeHead record{"tests:Point", {"x", "y"}};
  const wire::TypeHead colour{"tests:Colour", {}};
  const wire::Payload good = wire::example::write_everything(record, colour);
  Output everything;
  everything.byte(1).byte(60).rest(good.body.span());
  ValueWriter writer{Limits{}};
  writer.begin(ValueTag::dict, 1);
  writer.string("n");
  writer.part_tensor({wire::Framework::jax, tensor::DType::bfloat16, "", {2, 4}, 3});
  Output tensor;
  tensor.byte(1).byte(16).rest(writer.take().span());
  return {everything.take(), tensor.take()};
}

}  // namespace moolink::fuzz
