#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/time.h"
#include "wire/path.h"

namespace moolink::transport {

// Decides which accepted connections are kept. Few may be unauthenticated, in all and from one
// source, and a source whose connections only fail is refused for a growing time. A machine without
// I/O.
//
// Connections that stay open and send nothing lock no peer out: after a grace period the next one
// replaces the oldest. Failures do not lock a source out for long: now and then a connection is
// admitted all the same. This host is never refused: its processes have better ways to do harm.
class Admission {
 public:
  struct Config {
    std::size_t waiting = 256;                 // unauthenticated connections in all
    std::size_t of_source = 64;                // from one source; this host may have all
    Duration grace = milliseconds(500);        // before an unauthenticated one may be replaced
    std::size_t free_failures = 32;            // in a row, before a source is paused
    Duration first_pause = milliseconds(100);  // doubles with each failure
    Duration longest_pause = seconds(30);
    Duration trickle = milliseconds(200);  // a paused source is admitted once in this time
    std::size_t sources = 1024;            // remembered
  };

  explicit Admission(Config config) : config_(config) {}

  // Whether another connection from this source is admitted. The caller closes `replaced` for it,
  // and calls closed() for that one before accepted() for the new one.
  struct Answer {
    bool admitted = false;
    std::optional<wire::ConnectionId> replaced = std::nullopt;
  };
  Answer admit(Time now, const std::string& source, bool this_host);
  void accepted(Time now, wire::ConnectionId id, const std::string& source);
  void authenticated(wire::ConnectionId id);
  // A connection that was never authenticated counts as a failure of its source.
  void closed(Time now, wire::ConnectionId id);

  std::size_t waiting() const { return waiting_.size(); }
  std::size_t sources() const { return sources_.size(); }

 private:
  struct Waiting {
    std::string source;
    Time since;
  };
  struct Source {
    std::size_t waiting = 0;
    std::size_t failures = 0;  // in a row
    Time paused_until = Time::min();
    Time next_admission = Time::min();  // while paused
    Time last{};
  };

  std::optional<wire::ConnectionId> oldest_of(const std::string& source) const;
  const std::string& fullest() const;
  void forget_one();

  Config config_;
  std::map<wire::ConnectionId, Waiting> waiting_;  // numbers rise: the oldest is the first
  std::map<std::string, Source> sources_;
};

}  // namespace moolink::transport
