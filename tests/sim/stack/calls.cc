#include "stack/calls.h"

#include <cstring>

#include "common/message_bytes.h"
#include "common/program.h"
#include "common/simulation.h"

namespace moolink::sim {

std::uint64_t Calls::make(const Uid& from, const std::string& peer, std::uint16_t lane,
                          Time deadline, std::size_t bytes) {
  const std::uint64_t number = calls_.size() + 1;
  const MutableBuffer body = HeapAllocator().allocate(sizeof number);
  std::memcpy(body.data(), &number, sizeof number);
  Call& call = calls_[number];
  call.peer = peer;
  call.from = from;
  call.lane = lane;
  call.deadline = deadline;
  call.arguments = {body, {make_bytes(number, bytes)}};
  return number;
}

std::uint64_t Calls::runs(Time now, const std::string& name, const rpc::RunHandler& run) {
  std::uint64_t number = 0;
  require(run.arguments.body.size() == sizeof number, "a handler runs for arguments of nobody");
  std::memcpy(&number, run.arguments.body.data(), sizeof number);
  Call& call = calls_.at(number);
  const std::string which = "call " + std::to_string(number);
  require(call.peer == name && call.from == run.key.caller, which + " was run at the wrong place");
  require(++call.runs == 1, which + " was run twice");
  require(run.deadline > now, which + " was run after its time");
  require(same_bytes(run.arguments.parts.at(0), call.arguments.parts[0]),
          which + " has wrong arguments");
  return number;
}

void Calls::completes(Time now, std::uint64_t number, const rpc::Reply& reply, Time late) {
  Call& call = calls_.at(number);
  const std::string which = "call " + std::to_string(number);
  require(!call.done, which + " completed twice");
  call.done = true;
  require(now <= std::max(call.deadline, late) + milliseconds(2),
          which + " completed after its time");
  if (const auto* error = std::get_if<Error>(&reply)) {
    call.error = *error;
    ++coverage["calls failed"];
    return;
  }
  ++coverage["calls succeeded"];
  require(call.runs == 1 && call.replied, which + " has a result, but was not run");
  require(same_bytes(std::get<wire::Payload>(reply).parts.at(0), call.arguments.parts[0]),
          which + " has a wrong result");
}

void Calls::check_at_end(Time now, const std::function<bool(const Uid&)>& lives) const {
  for (const auto& [number, call] : calls_) {
    const std::string which = "call " + std::to_string(number);
    if (!lives(call.from)) continue;
    require(call.done || now <= call.deadline + milliseconds(2), which + " never completed");
    const bool not_run = call.error && call.error->ran == Ran::no;
    require(!not_run || call.runs == 0, which + " was run, but its error says not");
  }
}

}  // namespace moolink::sim
