#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "bind/rpc.h"
#include "runtime/group/group_peer.h"

namespace moolink::bind {

// The core of moolink.Group.
class PyGroup {
 public:
  PyGroup(const PyRpc& rpc, const std::string& name);
  ~PyGroup() { close(); }
  PyGroup(const PyGroup&) = delete;
  PyGroup& operator=(const PyGroup&) = delete;

  void close();
  // The key by which compiled programs find it: its name, and a number if another open group of
  // this process has it.
  const std::string& program_key() const { return program_key_; }

  runtime::GroupPeer& peer() const { return *group_; }
  runtime::Context& context() const { return *group_->rpc()->context(); }
  const std::shared_ptr<runtime::GroupPeer>& group() const { return group_; }
  const ValueOptions& options() const { return options_; }

 private:
  ValueOptions options_;
  std::shared_ptr<runtime::GroupPeer> group_;
  std::string program_key_;
};

// The group of this process with the key: by a text, because a compiled program may outlive the
// group object that it was traced with, and be stored on disk. Null: there is none, or it was
// closed.
std::shared_ptr<runtime::GroupPeer> find_program_group(const std::string& key);

}  // namespace moolink::bind
