#pragma once

// What a scenario has in common with others: contexts and peers that may fail to be made, calls
// that may end in an error, and what is wrong with such an error.

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "faults.h"
#include "runtime/engine/context.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::injection {

// What went wrong in one run of a scenario, and what was logged in it.
class Report {
 public:
  void complain(std::string what);
  void log(std::string_view line);
  std::vector<std::string> complaints() const;
  std::vector<std::string> lines() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> complaints_;
  std::vector<std::string> lines_;
};

// Runs the library's part of a scenario. An exception must come of the injected fault and name it;
// then once more, without one. False: it failed for another reason, which was complained of.
bool attempt(Report& report, const char* what, const std::function<void()>& part);
// Complains unless the error comes of the injected fault.
void check_error(Report& report, const char* what, const Error& error);

struct Scenario {
  const char* name;
  void (*run)(Report& report);
};
const std::vector<Scenario>& scenarios();

// A context with one peer, as in a process of its own.
struct Process {
  Process(Report& report, const std::string& name, std::vector<wire::PathKind> paths);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  Report& report;
  std::shared_ptr<runtime::Context> context;
  std::shared_ptr<runtime::RpcPeer> peer;
};

// A payload of one part of so many bytes, which are told by `number`; 0: none.
wire::Payload payload_of(std::uint64_t number, std::size_t bytes);
bool is_payload_of(const wire::Payload& payload, std::uint64_t number, std::size_t bytes);

}  // namespace moolink::injection
