#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/enum_names.h"
#include "base/error.h"
#include "base/uid.h"

namespace moolink::group {

// A peer's part in one view. A newcomer lacks the group's state (parameters and counters) and
// receives a snapshot; an observer receives and never takes part in an operation.
enum class Role : std::uint8_t { member, newcomer, observer };
constexpr Role enum_max(Role) { return Role::observer; }

// Why a view was made. With several reasons, the first in this order is named.
enum class Cause : std::uint8_t {
  formed,    // a new lineage: the first view, or no holder of the state is left
  died,      // a proof of death
  silent,    // not heard for longer than its evict_after, by the broker or by half of the others
  left,      // LEAVE
  repaired,  // members had different epochs, or one had a gap: all begin a new one
  demoted,   // the leader asked to make a member a newcomer
  joined,
  ordered,  // a sort order changed
};
constexpr Cause enum_max(Cause) { return Cause::ordered; }
inline constexpr auto kCauses = enum_names<Cause::ordered>(
    "the group formed", "a peer died", "a peer fell silent", "a peer left",
    "the members' views had come apart", "a peer was made a newcomer", "a peer joined",
    "the sort order changed");

struct MemberInfo {
  Uid instance;
  std::string name;
  std::int64_t sort = 0;
  Uid host_key;              // equal for peers that can share memory
  Role role = Role::member;  // as the broker knew it when it made the view
  // The epoch in which this peer joined, or became a newcomer. A peer that took over the group's
  // state in that epoch or a later one keeps it, though a view made meanwhile may still say
  // newcomer.
  std::uint64_t since = 0;

  bool operator==(const MemberInfo&) const = default;

  auto fields() { return std::tie(instance, name, sort, host_key, role, since); }
};

// A numbered list of the group's members. The number rises strictly at every member; two views of
// one lineage with the same number are the same view. A rank is an index into `members`: members
// and newcomers first, by (sort, order of joining), observers after them.
//
// A soft view only adds peers, reports no loss and need not interrupt anything: a group with an
// accumulator continues in the old epoch until the boundary that its leader names.
struct View {
  std::uint64_t epoch = 0;  // 0: no view
  Uid lineage;              // made when the group forms without a holder of the state
  std::vector<MemberInfo> members;
  Cause cause = Cause::formed;
  bool soft = false;

  bool operator==(const View&) const = default;

  bool empty() const { return epoch == 0; }
  bool has_duplicates() const;  // an instance twice: no broker makes such a view
  const MemberInfo* find(const Uid& instance) const;
  const MemberInfo* find(std::string_view name) const;
  std::optional<std::size_t> rank_of(const Uid& instance) const;
  bool share_host(const Uid& one, const Uid& other) const;  // both are members of one host
  // Members and newcomers: the ranks 0 .. participants() - 1, which take part in operations.
  std::size_t participants() const;

  auto fields() { return std::tie(epoch, lineage, members, cause, soft); }
};

// A view that its holders in one process share; the empty view is no_view().
using SharedView = std::shared_ptr<const View>;
inline SharedView no_view() { return std::make_shared<const View>(); }

// "a, b"; in quotes: "'a', 'b'".
std::string joined(const std::vector<std::string>& names, std::string_view quote = "");

// "epoch 7 (peer b died): a, c"
std::string describe(const View& view);

// The error of an operation that began in `before` and cannot end because of `after`; it names the
// peers that joined and left.
Error group_changed(std::string_view group, std::string_view operation, const View& before,
                    const View& after);

}  // namespace moolink::group
