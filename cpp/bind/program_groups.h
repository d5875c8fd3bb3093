#pragma once

// The groups of this process for compiled programs: by a text key, because a program may outlive
// the group object that it was traced with, and be stored on disk.

#include <memory>
#include <string>

#include "runtime/group/group_peer.h"

namespace moolink::bind {

// Returns the group's key: its name, and a number if another open group of this process has it.
std::string add_program_group(const std::shared_ptr<runtime::GroupPeer>& group);
void remove_program_group(const std::string& key);
// Null: there is none, or it was closed.
std::shared_ptr<runtime::GroupPeer> find_program_group(const std::string& key);

}  // namespace moolink::bind
