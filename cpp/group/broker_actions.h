#pragma once

// A broker's configuration and actions.

#include <cstddef>
#include <string>
#include <variant>

#include "base/buffer.h"
#include "base/log.h"
#include "base/time.h"
#include "base/uid.h"

namespace moolink::group {

struct BrokerConfig {
  // After a start, announcements are only gathered for this long, so that all members of a group
  // that outlived an earlier broker are heard before any decision. Zero for a broker that is known
  // to be the first one (embedded by `moolink run`).
  Duration gather = seconds(1);
  Duration coalesce = milliseconds(250);  // between views that only add peers
  Duration tick_every = milliseconds(50);
  Duration late = milliseconds(500);    // own lateness that makes its clock unfit to judge ...
  Duration disarmed = seconds(1);       // ... others' silence, for this long
  Duration suspect_after = seconds(1);  // silent this long: its name may be taken over
  Duration suspected_for = milliseconds(500);  // suspicions of silence must last, to count
  Duration abandon_after = seconds(10);   // silence that removes even the last holder of the state
  Duration lineage_settle = seconds(10);  // a lineage younger than this yields to an older one
  Duration resend_every = milliseconds(200);
  Duration forget_after = seconds(600);  // a group without members
  std::size_t most_groups = 4096;
};

// A message to a peer of a group.
struct BrokerSend {
  Uid instance;
  std::string name;
  std::string group;
  Buffer bytes;
};

struct BrokerLog {
  LogLevel level = LogLevel::info;
  std::string text;
};

using BrokerAction = std::variant<BrokerSend, BrokerLog>;

}  // namespace moolink::group
