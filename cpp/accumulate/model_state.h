#pragma once

#include <cstdint>

#include "accumulate/messages.h"

namespace moolink::accumulate {

// What this peer has of the group's state, in the order of a newcomer's way: stateless, promised a
// snapshot (pending), complete, installed by the user, and keeping up with the rounds.
// StateTransfer leads along that way and back to its beginning; a change of epoch may do so, too.
// Also the model version of the user's parameters, which a peer without the state has as well.
class ModelState {
 public:
  // --- transitions -------------------------------------------------------------------------------
  void promise(const SnapshotId& id) {
    status_ = StateStatus::pending;
    snapshot_ = id;
  }
  void arrive() {  // the snapshot: the user does not have it yet
    status_ = StateStatus::complete;
    is_installed_ = false;
  }
  void install(std::uint64_t version) {
    version_ = version;
    is_installed_ = true;
  }
  void begin_history(std::uint64_t version) {  // with the user's own parameters
    status_ = StateStatus::complete;
    install(version);
  }
  void lose() {
    status_ = StateStatus::stateless;
    is_installed_ = keeps_up_ = false;
  }
  void lose_with_history() {
    lose();
    snapshot_ = {};
  }
  void set_version(std::uint64_t version) { version_ = version; }
  void set_keeps_up(bool keeps_up) { keeps_up_ = keeps_up; }

  // --- the state ---------------------------------------------------------------------------------
  StateStatus status() const { return status_; }
  bool is_stateless() const { return status_ == StateStatus::stateless; }
  bool is_complete() const { return status_ == StateStatus::complete; }
  bool is_installed() const { return is_complete() && is_installed_; }
  // Was near the last round, so that the leader waits for this peer.
  bool keeps_up() const { return keeps_up_; }
  std::uint64_t version() const { return version_; }
  // Promised to this peer, or installed by it.
  const SnapshotId& snapshot() const { return snapshot_; }

 private:
  StateStatus status_ = StateStatus::stateless;
  bool is_installed_ = false;
  bool keeps_up_ = false;
  std::uint64_t version_ = 0;
  SnapshotId snapshot_;
};

}  // namespace moolink::accumulate
