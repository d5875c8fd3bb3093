// What rides on a simulated group, and what must be true of it.

#include <algorithm>
#include <utility>

#include "common/program.h"
#include "group/world.h"

namespace moolink::sim {

using group::View;

namespace {

constexpr const char* kGroup = "g";

[[noreturn]] void violate(const Process& process, const std::string& what) {
  throw Violation(process.name + ": " + what);
}

}  // namespace

// ---- operations: frames that carry their epoch

void World::send_frames(int index) {
  Process& process = this->process(index);
  const View& view = *process.member->active_view();
  if (!view.empty() && view.members.size() > 1) {
    const auto& target = view.members[random_.below(view.members.size())];
    const int to = index_of(target.instance);
    if (to >= 0 && to != index) {
      deliver(index, to, target.instance, "frame",
              [this, to, index, view] { receive_frame(to, index, view); });
    }
  }
  on(index, ms(50, 200), [this, index] { send_frames(index); });
}

void World::receive_frame(int index, int from, const View& sent_in) {
  Process& process = this->process(index);
  const Process& sender = this->process(from);
  const auto verdict =
      process.member->check_frame(now_, sender.instance, sender.name, sent_in.epoch);
  switch (verdict) {
    case group::FrameEpoch::current:
      ++coverage["frames applied"];
      break;
    case group::FrameEpoch::pending:
      ++coverage["frames of a pending epoch"];
      return;
    case group::FrameEpoch::older:
      ++coverage["frames refused"];
      return;
    case group::FrameEpoch::newer:
      ++coverage["frames ahead of their view"];
      return;
  }
  ++process.frames_applied;
  if (*process.member->active_view() != sent_in) {
    violate(process, "applied a frame of " + describe(sent_in) + " from " + sender.name + " in " +
                         describe(*process.member->active_view()));
  }
}

// ---- the state, as an accumulator would hand it on

void World::seek_state(int index) {
  Process& process = this->process(index);
  const View& view = *process.member->view();
  if (!view.empty() && !process.member->has_state()) {
    int holder = -1;
    for (const auto& member : view.members) {
      const int other = index_of(member.instance);
      if (other > 0 && this->process(other).truth == view.lineage && !blocked(index, other) &&
          this->process(other).frozen_until <= now_) {
        holder = other;
      }
    }
    // Nobody has held it yet: the first of them is elected.
    const bool held = std::ranges::any_of(processes_,
                                          [&](const auto& other) {
                                            return other->alive && other->truth == view.lineage;
                                          }) ||
                      std::ranges::any_of(view.members, [](const group::MemberInfo& member) {
                        return member.role == group::Role::member;
                      });
    const bool elected = !held && view.members.front().instance == process.instance;
    if (holder >= 0 || elected) {
      process.truth = view.lineage;
      process.member->set_has_state(now_, true);
      note(index, "has state", view.epoch);
    }
  }
  on(index, ms(50, 400), [this, index] { seek_state(index); });
}

// ---- invariants

void World::check_view(Process& process, const View& view) {
  if (view.epoch <= process.last_epoch) {
    violate(process, "epoch went from " + std::to_string(process.last_epoch) + " to " +
                         std::to_string(view.epoch));
  }
  process.last_epoch = view.epoch;
  const auto [known, first] = known_views_.try_emplace({view.epoch, view.lineage}, view);
  if (!first && known->second != view) {
    violate(process,
            "two views of one epoch: " + describe(known->second) + " and " + describe(view));
  }
  const group::MemberInfo* self = view.find(process.instance);
  if (self == nullptr) violate(process, "accepted a view without itself: " + describe(view));
  // What the broker made of an announcement may be overtaken by an eviction; it puts that right.
  const bool just_evicted = process.evicted_at + seconds(1) > now_;
  if (options_.stateful && self->role == group::Role::member && process.truth != view.lineage &&
      !just_evicted) {
    violate(process, "a member without the state in " + describe(view));
  }
}

void World::check_process(Process& process) {
  const View& active = *process.member->active_view();
  if (active.empty()) return;
  if (active.find(process.instance) == nullptr) {
    violate(process, "active in a view without itself: " + describe(active));
  }
  if (active.epoch > process.member->view()->epoch) violate(process, "active beyond its last view");
}

std::vector<int> World::live_peers() const {
  std::vector<int> live;
  for (const auto& process : processes_) {
    if (process->index != kBroker && process->alive) live.push_back(process->index);
  }
  return live;
}

std::string World::disagreement() {
  const auto live = live_peers();
  if (live.empty()) return {};
  const View& common = *process(live.front()).member->active_view();
  for (const int index : live) {
    const Process& peer = process(index);
    if (!peer.member->active()) return peer.name + " is not active: " + peer.member->waiting_for();
    if (*peer.member->active_view() != common || *peer.member->view() != common) {
      return peer.name + " is in " + describe(*peer.member->view()) + ", " +
             process(live.front()).name + " in " + describe(common);
    }
    if (common.epoch <= peer.lost_session_in) {
      return peer.name + " lost a session in " + describe(common) + ", which goes on";
    }
    if (common.find(peer.instance) == nullptr) return describe(common) + " lacks " + peer.name;
    if (options_.stateful && !peer.observer && !peer.member->has_state()) {
      return peer.name + " is without the state";
    }
  }
  if (common.members.size() != live.size()) return describe(common) + " holds the dead";
  if (!process(kBroker).alive) return {};
  const View* view = process(kBroker).broker->view(kGroup);
  return view != nullptr && *view == common ? std::string() : "the broker disagrees";
}

}  // namespace moolink::sim
