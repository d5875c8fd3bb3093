#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "base/error.h"
#include "collective/compression.h"
#include "collective/kernels.h"
#include "collective/passage.h"
#include "tensor/dtype.h"
#include "tensor/layout.h"
#include "wire/archive.h"

namespace moolink::collective {

// All members must agree on it before any element is reduced. Ranks are indices into the engine's
// members; an empty list means all members.
struct OpSpec {
  Kind kind = Kind::all_reduce;
  std::uint32_t root = 0;  // of the kinds that have one
  tensor::DType dtype = tensor::DType::float32;
  ReduceOp op = ReduceOp::sum;
  double divisor = 1;   // of the reduced elements; mean sets it to the number of contributors
  tensor::Shape shape;  // of a block: see Passage
  std::string layout;   // describes the tensors of the elements; equal at all members
  std::vector<std::uint32_t> contributors;      // members with an input
  Compression compression = Compression::none;  // between hosts

  bool operator==(const OpSpec&) const = default;

  std::uint64_t byte_size() const;  // throws Exception{invalid_argument}
  std::uint64_t count() const { return byte_size() / tensor::item_size(dtype); }  // the same
  Passage passage(std::size_t members) const {
    return {kind, root, static_cast<std::uint32_t>(members), tensor::item_size(dtype), count()};
  }
  bool contributes(std::uint32_t rank) const;
  bool adds() const { return op == ReduceOp::sum || op == ReduceOp::mean; }
  std::string text() const;  // "sum of float32 (3, 4)"

  auto fields() {
    return std::tie(kind, root, dtype, op, divisor, shape, layout, contributors, compression);
  }
};

// The n-th operation of a name in an epoch.
struct OpKey {
  std::string name;
  std::uint64_t number = 0;

  auto operator<=>(const OpKey&) const = default;

  auto fields() { return std::tie(name, number); }
};

// The sender's elements for the receiver, which are the payload's only part. An allreduce has no
// pieces.
struct Piece {
  OpSpec spec;

  auto fields() { return std::tie(spec); }
};

// A value for rank 0 to combine; body and parts are the payload's parts.
struct Value {};

// Rank 0's result; body and parts are the payload's parts.
struct Combined {};

// The operation cannot succeed at any member.
struct Failure {
  Error error;
  std::uint64_t shared = 0;  // rank 0's: as in Go, if it sent Go; else it never will
  bool asks_why = false;     // the receiver names the members that it waits for, and fails it

  auto fields() { return std::tie(error, shared, asks_why); }
};

// To rank 0: the sender has started it.
struct Started {
  OpSpec spec;

  auto fields() { return std::tie(spec); }
};

// From rank 0: all members have started the same.
struct Go {
  std::uint64_t shared = 0;  // its number among those that pass through shared memory; 0: messages

  auto fields() { return std::tie(shared); }
};

// Elements of one chain of an exchange (schedule.h), the payload's only part: in a round of the
// schedule, or for a guest.
struct Portion {
  static constexpr std::uint32_t kForGuest = 0xffffffff;  // the result

  OpSpec spec;
  std::uint32_t chain = 0;
  std::uint32_t round = 0;

  auto fields() { return std::tie(spec, chain, round); }
};

// The body of every payload of service `collective`.
struct Frame {
  std::string scope;
  std::uint64_t epoch = 0;
  OpKey key;
  std::variant<Piece, Value, Combined, Failure, Started, Go, Portion> content;

  auto fields() { return std::tie(scope, epoch, key, content); }
};

}  // namespace moolink::collective
