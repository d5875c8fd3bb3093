#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/time.h"

namespace moolink::transport {

// Of accept(2).
Error cannot_accept_error(int error_number);

// Who of those that knock may come in: accepted connections that have not yet shown who they are
// (strangers) are few, in all and from one source, and a source from which come failures only is
// turned away for a growing time. A machine without I/O.
//
// Who keeps connections open and says nothing shuts nobody out: a stranger that has had some time
// makes room for the next one. Who fails again and again shuts out nobody of the same source for
// long: a connection is let in now and then all the same, and this host is never turned away, for
// whoever is on it has better ways to do harm.
class Door {
 public:
  using Guest = std::uint64_t;  // the caller's number of a stranger

  struct Config {
    std::size_t strangers = 256;               // in all
    std::size_t of_source = 64;                // from one source; this host may have all
    Duration grace = milliseconds(500);        // for so long a stranger need not make room
    std::size_t free_failures = 32;            // in a row, before a source is turned away
    Duration first_pause = milliseconds(100);  // doubles with each failure
    Duration longest_pause = seconds(30);
    Duration trickle = milliseconds(200);  // who is turned away is let in once in such a time
    std::size_t sources = 1024;            // remembered
  };

  explicit Door(Config config) : config_(config) {}

  // Whether one more from this source may come in. `leaves`: who is to be closed for it, with
  // left() called for it before entered().
  struct Answer {
    bool welcome = false;
    std::optional<Guest> leaves = std::nullopt;
  };
  Answer knock(Time now, const std::string& source, bool this_host);
  void entered(Time now, Guest guest, const std::string& source);
  // It has shown who it is: its source is a good one.
  void proven(Guest guest);
  // It is gone. Unless it was proven before, that was a failure of its source.
  void left(Time now, Guest guest);

  std::size_t strangers() const { return strangers_.size(); }
  std::size_t sources() const { return sources_.size(); }

 private:
  struct Stranger {
    std::string source;
    Time since;
  };
  struct Source {
    std::size_t strangers = 0;
    std::size_t failures = 0;  // in a row
    Time shut_until = Time::min();
    Time let_in_at = Time::min();  // all the same
    Time last{};
  };

  std::optional<Guest> oldest_of(const std::string& source) const;
  const std::string& fullest() const;
  void forget_one();

  Config config_;
  std::map<Guest, Stranger> strangers_;  // numbers rise: the oldest is the first
  std::map<std::string, Source> sources_;
};

}  // namespace moolink::transport
