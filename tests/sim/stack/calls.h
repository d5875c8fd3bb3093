#pragma once

// Calls that processes make of one another between everything else, and the checks of them.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/time.h"
#include "base/uid.h"
#include "rpc/node.h"
#include "wire/payload.h"

namespace moolink::sim {

struct Call {
  std::string peer;
  Uid from;
  std::uint16_t lane = 0;
  Time deadline;
  wire::Payload arguments;
  int runs = 0;
  bool replied = false;
  bool done = false;
  std::optional<Error> error;
};

class Calls {
 public:
  // A call of some size; its number is the first word of its arguments, and rises.
  std::uint64_t make(const Uid& from, const std::string& peer, std::uint16_t lane, Time deadline,
                     std::size_t bytes);
  Call& of(std::uint64_t number) { return calls_.at(number); }
  // A handler runs for it. Returns its number.
  std::uint64_t runs(Time now, const std::string& name, const rpc::RunHandler& run);
  // `late`: how much later than at its deadline the caller may learn of its end.
  void completes(Time now, std::uint64_t number, const rpc::Reply& reply, Time late);
  // Every call of somebody who lives has ended by its deadline.
  void check_at_end(Time now, const std::function<bool(const Uid&)>& lives) const;

 private:
  std::map<std::uint64_t, Call> calls_;
};

}  // namespace moolink::sim
