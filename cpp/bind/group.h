#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/future.h"
#include "bind/rpc.h"
#include "bind/tensor.h"
#include "runtime/group/group_peer.h"

namespace moolink::bind {

// The core of moolink.Group.
class PyGroup {
 public:
  PyGroup(const PyRpc& rpc, const std::string& name);
  ~PyGroup() { close(); }
  PyGroup(const PyGroup&) = delete;
  PyGroup& operator=(const PyGroup&) = delete;

  // With the GIL, which guards the view that it changes.
  bool update();
  bool wait_for_members(std::size_t count, std::optional<double> timeout);
  std::vector<std::string> members() const;
  std::optional<std::size_t> rank() const;
  std::uint64_t epoch() const { return group_->view().epoch; }
  bool active() const { return !group_->view().empty(); }
  // Without the GIL:
  std::string waiting_for() const { return group_->waiting_for(); }
  void set_timeout(double seconds);
  void set_sort_order(std::int64_t order) { group_->set_sort_order(order); }
  void set_broker_name(const std::string& name) { group_->set_broker_name(name); }
  bool closed() const;
  // `array`: this member's input, whatever its shape; `count`: elements of a block
  // (collective/plan.h); `output`: where the result goes, or None: a new flat array, which the
  // future returns. With `output` the future returns None. A large input is used until the future
  // is done.
  nb::object collective(const std::string& name, const std::string& kind, std::uint32_t root,
                        const std::string& op, const std::string& dtype, const std::string& layout,
                        std::int64_t count, nb::handle array, nb::handle output, bool retry,
                        const std::string& compress);
  // The same for one array of numpy or torch; the future returns an array of that kind, or `output`
  // with the result. None: not such a simple case.
  nb::object all_reduce(const std::string& name, const std::string& op, nb::handle array,
                        nb::handle output, bool retry);
  // Throws Exception{invalid_argument} unless the elements support the operation.
  static void check_reduction(const std::string& op, const std::string& dtype);
  // A new array of bytes in reused memory.
  nb::object memory(std::size_t bytes);
  nb::object all_reduce_value(const std::string& name, nb::handle value, nb::callable op,
                              bool retry);
  void close();
  // The key by which compiled programs find it: its name, and a number if another open group of
  // this process has it.
  const std::string& program_key() const { return program_key_; }

  const std::shared_ptr<runtime::GroupPeer>& group() const { return group_; }
  const ValueOptions& options() const { return options_; }

 private:
  nb::object start(const std::string& name, collective::OpSpec spec, const ImportedTensor& given,
                   MutableBuffer output, PyFuture::Decode decode, bool retry);

  ValueOptions options_;
  std::shared_ptr<runtime::GroupPeer> group_;
  std::string program_key_;
};

// The group of this process with the key: by a text, because a compiled program may outlive the
// group object that it was traced with, and be stored on disk. Null: there is none, or it was
// closed.
std::shared_ptr<runtime::GroupPeer> find_program_group(const std::string& key);

}  // namespace moolink::bind
