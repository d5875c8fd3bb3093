#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "collective/kernels.h"
#include "collective/messages.h"
#include "collective/plan.h"
#include "wire/payload.h"

namespace moolink::collective {

using OpId = std::uint64_t;

// The "slice" of the task that adds up this member's own inputs before anything is sent.
inline constexpr std::uint32_t kOwnInputs = 0xffffffff;

// One member's part of one allreduce:
//   contributors send slice j of their input to reducer j   (Piece)
//   reducer j, with the pieces of all contributors, reduces them in rank order and sends its slice
//   to everyone                                             (Reduced)
//   done when every slice is here.
// Each element is computed by one member only, so all members end with the same bits. A value with
// a Python operation goes to rank 0 and its result to everyone instead.
class Operation {
 public:
  // What was asked for, from which the operation can be started again in another epoch.
  struct Request {
    std::string name;
    std::variant<OpSpec, wire::Payload> what;
    std::vector<Buffer> inputs;  // of a tensor operation
    bool retry = false;
    std::optional<std::uint64_t> number;
  };
  // Where it runs.
  struct Place {
    std::uint32_t rank = 0;
    std::vector<std::string> names;  // of all members, in rank order
  };
  struct Outgoing {
    std::uint32_t to = 0;
    decltype(Frame::content) content;
    std::vector<Buffer> parts;
  };
  struct Task {
    std::uint32_t slice = 0;
    SumTask task;
  };
  // What is to be done after an event; taken by the engine.
  struct Effects {
    std::vector<Outgoing> outgoing;
    std::vector<Task> tasks;
    std::optional<std::vector<wire::Payload>> combine;
    bool finished = false;
  };

  Operation(OpId id, OpKey key, Request request, Place place, Allocator& memory);

  void begin();
  void received(std::uint32_t from, const decltype(Frame::content)& content,
                const std::vector<Buffer>& parts);
  void summed(std::uint32_t slice);
  void combined(std::variant<wire::Payload, Error> result);
  // Fails here and, unless `local`, at everyone.
  void fail(Error error, bool local = false);

  Effects take_effects() { return std::exchange(effects_, {}); }
  Request take_request() { return std::move(request_); }

  OpId id() const { return id_; }
  const OpKey& key() const { return key_; }
  bool retry() const { return request_.retry; }
  const Error& error() const { return error_; }
  const MutableBuffer& tensor() const { return result_; }
  const wire::Payload& value() const { return value_; }
  std::vector<std::string> waiting_for() const;

 private:
  const OpSpec* spec() const { return std::get_if<OpSpec>(&request_.what); }
  // The first slice takes part even when it is empty: plan.h.
  bool takes_part(std::size_t slice) const { return slice == 0 || !slices_[slice].empty(); }
  const std::string& name_of(std::uint32_t rank) const { return place_.names[rank]; }
  std::size_t owner_index(std::uint32_t rank) const;  // among the reducers, or their number
  Buffer bytes_of(const Buffer& whole, const Range& range) const;

  void send_pieces();
  void piece(std::uint32_t from, const OpSpec& theirs, const std::vector<Buffer>& parts);
  void reduced(std::uint32_t from, const std::vector<Buffer>& parts);
  void value_arrived(std::uint32_t from, const std::vector<Buffer>& parts);
  void reduce_when_complete();
  void finish_when_complete();
  void refuse(std::uint32_t from, const std::string& what);
  void to_others(const decltype(Frame::content)& content, const std::vector<Buffer>& parts);

  OpId id_;
  OpKey key_;
  Request request_;
  Place place_;
  std::size_t item_size_ = 1;
  std::vector<std::uint32_t> contributors_;
  std::vector<std::uint32_t> reducers_;
  std::vector<Range> slices_;  // one a reducer
  Buffer input_;               // this member's, its own inputs added up
  MutableBuffer sum_of_inputs_;
  MutableBuffer result_;
  std::map<std::uint32_t, Buffer> pieces_;  // of my slice, by contributor
  bool reducing_ = false;
  std::vector<std::uint8_t> have_;  // of each slice: 0 nothing, 1 being put in place, 2 there
  std::map<std::uint32_t, wire::Payload> values_;
  wire::Payload value_;
  Error error_;
  Effects effects_;
};

}  // namespace moolink::collective
