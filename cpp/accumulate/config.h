#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "accumulate/snapshot.h"
#include "group/view.h"

namespace moolink::accumulate {

// The configuration of a Machine, which its parts read.
struct Config {
  std::string group;
  Uid instance;
  std::string name;
  group::Role role = group::Role::member;
  // The user's own settings at the beginning, used when this peer leads; 0: not set, 1 until then.
  std::int64_t virtual_batch_size = 0;
  std::uint32_t parallel_gradients = 0;  // rounds cut and not yet at every member
  std::size_t bucket_bytes = 0;          // of a contribution and of a result
  std::uint64_t layout = 0;              // hash of names, shapes and dtypes of the parameters
  std::string layout_text;  // human-readable, for the error of a peer with another layout
  Duration member_stall = seconds(10);      // full result slots for this long: newcomer again
  Duration settings_timeout = seconds(10);  // with settings that are not the leader's
  Duration share_wait = seconds(1);      // then a fast member fills in for a slow one; 0: at once
  Duration soft_view_wait = seconds(1);  // a join waits at most this long for a round boundary
  Duration snapshot_gather = milliseconds(100);  // joins within this time share one snapshot
  // Of results that wait at a newcomer; more if the state is large.
  std::size_t backlog_bytes = std::size_t{256} << 20;
  std::size_t backlog_rounds = 1024;
  Duration snapshot_timeout = seconds(5);   // then another parent is asked
  std::uint32_t chunk_bytes = kChunkBytes;  // of snapshots
  std::shared_ptr<Allocator> memory;        // for received snapshots; null: the heap
};

}  // namespace moolink::accumulate
