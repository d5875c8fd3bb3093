#pragma once

#include <string>
#include <vector>

#include "base/names.h"
#include "base/time.h"
#include "rpc/actions.h"
#include "rpc/connection_table.h"
#include "rpc/dialler.h"
#include "rpc/directory.h"
#include "rpc/peers.h"
#include "rpc/shared.h"
#include "session/session.h"
#include "wire/path.h"

namespace moolink::rpc {

// How peers are reached, and why not on a better path: human-readable, read from the components of
// a Node. It is made for one report, and decides and changes nothing.
class Explainer {
 public:
  Explainer(const Shared& shared, const Peers& peers, const ConnectionTable& connections,
            const Dialler& dialler, const Directory& directory)
      : shared_(shared),
        peers_(peers),
        connections_(connections),
        dialler_(dialler),
        directory_(directory) {}

  Explanation explain(Time now, const std::string& name) const;

 private:
  void explain_peer(Time now, const Peer& peer, Explanation& explanation) const;
  void explain_absence(Time now, const PeerName& of, Explanation& explanation) const;
  PathState explain_path(wire::PathKind kind, const Peer& peer,
                         const std::vector<session::LinkInfo>& links) const;
  std::string why_not_live(const PathState& path, const Peer& peer) const;

  const Shared& shared_;
  const Peers& peers_;
  const ConnectionTable& connections_;
  const Dialler& dialler_;
  const Directory& directory_;
};

}  // namespace moolink::rpc
