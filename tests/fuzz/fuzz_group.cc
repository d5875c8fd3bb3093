// A broker and members, between whom messages are lost, repeated, given to others, bent and made
// up. What does not decode is refused; epochs rise, and no view has a peer twice.

#include <map>
#include <optional>

#include "group/broker.h"
#include "group/member.h"
#include "mail.h"
#include "target.h"

namespace moolink::fuzz {
namespace {

using namespace moolink::group;

constexpr std::size_t kMembers = 3;
constexpr Uid kBroker{7, 7};

Uid id_of(std::size_t member) { return {1, member + 1}; }

class World {
 public:
  World() {
    BrokerConfig config;
    config.gather = milliseconds(20);
    broker_.emplace(config, 1, now_);
    for (std::size_t i = 0; i < kMembers; ++i) {
      MemberConfig member;
      member.group = "g";
      member.stateful = i % 2 == 0;
      member.self.instance = id_of(i);
      member.self.name = "p" + std::to_string(i);
      members_[i].emplace(member, now_);
      members_[i]->broker_up(now_, kBroker);
    }
  }

  void act(Input& input) {
    const std::size_t who = input.below(kMembers);
    Member& member = *members_[who];
    switch (input.below(12)) {
      case 0:
      case 1:
        return pass(milliseconds(1 + input.byte()));
      case 2:
        return member.peer_down(now_, id_of(input.below(kMembers + 1)),
                                static_cast<Down>(input.below(3)));
      case 3:
        return member.peer_up(now_, id_of(input.below(kMembers + 1)));
      case 4:
        return broker_->peer_down(now_, id_of(who), static_cast<Down>(input.below(3)));
      case 5:
        if (member.active()) member.set_has_state(now_, input.chance());
        member.hold_soft_views(input.chance());
        return member.activate(now_, input.number());
      case 6:
        member.set_sort_order(now_, input.byte());
        return member.ask_demotion(now_, id_of(input.below(kMembers)));
      case 7:
        (void)member.check_frame(now_, id_of(input.below(kMembers)), "p", input.number());
        return;
      case 8:
        return deliver(who, id_of(input.below(kMembers + 1)), input.bytes());
      default: {
        if (mail_.empty()) return;
        Letter letter = mail_.pick(input);
        if (input.chance()) bend(input, letter.bytes);
        if (input.byte() == 1) letter.from = id_of(input.below(kMembers + 1));
        deliver(input.byte() == 1 ? who : letter.to, letter.from, letter.bytes);
      }
    }
  }

  void drain() {
    for (auto& action : broker_->drain()) {
      auto* send = std::get_if<Broker::Send>(&action);
      if (send == nullptr) continue;
      for (std::size_t i = 0; i < kMembers; ++i) {
        if (send->instance == id_of(i)) post({kBroker, i, copy_of(send->bytes)});
      }
    }
    for (std::size_t i = 0; i < kMembers; ++i) {
      for (auto& action : members_[i]->drain()) {
        if (const auto* to_broker = std::get_if<Member::SendToBroker>(&action)) {
          post({id_of(i), kMembers, copy_of(to_broker->bytes)});
        } else if (const auto* to_member = std::get_if<Member::SendToMember>(&action)) {
          for (std::size_t j = 0; j < kMembers; ++j) {
            if (to_member->instance == id_of(j)) post({id_of(i), j, copy_of(to_member->bytes)});
          }
        } else if (const auto* view = std::get_if<Member::NewView>(&action)) {
          FUZZ_CHECK(view->view->epoch > epochs_[i]);
          epochs_[i] = view->view->epoch;
          FUZZ_CHECK(!view->view->has_duplicates());
          FUZZ_CHECK(view->view->find(id_of(i)) != nullptr);
        }
      }
    }
    FUZZ_CHECK(broker_->groups().size() <= 1024);
  }

 private:
  struct Letter {
    Uid from;
    std::size_t to;  // kMembers: the broker
    Bytes bytes;
  };

  // Kept for later, and delivered as it is.
  void post(Letter letter) {
    mail_.post(letter);
    due_.push_back(std::move(letter));
  }

  void pass(Duration duration) {
    for (Letter& letter : std::exchange(due_, {})) deliver(letter.to, letter.from, letter.bytes);
    now_ += duration;
    broker_->tick(now_);
    for (auto& member : members_) member->tick(now_);
  }

  void deliver(std::size_t to, const Uid& from, const Bytes& bytes) {
    refused([&] {
      const Recipient recipient = recipient_of(bytes);
      if (to == kMembers) {
        if (recipient.broker) broker_->received(now_, from, bytes);
      } else if (!recipient.broker && recipient.group == "g") {
        members_[to]->received(now_, from, bytes);
      }
    });
  }

  Time now_{seconds(100)};
  std::optional<Broker> broker_;
  std::optional<Member> members_[kMembers];
  std::uint64_t epochs_[kMembers] = {};
  std::vector<Letter> due_;
  Mail<Letter> mail_;
};

}  // namespace

void run(Input input) {
  World world;
  drive(world, input);
}

std::vector<Bytes> seeds() {
  Output formed;
  for (int i = 0; i < 12; ++i) formed.byte(0).byte(0).byte(100);
  Output busy;
  for (std::uint64_t i = 0; i < 12; ++i) {
    busy.byte(i % 3).byte(0).byte(100);
    busy.byte(i % 3).byte(9).byte(i).byte(1).byte(1).number(20 + i).byte(1).byte(3).byte(0).byte(0);
    busy.byte(i % 3).byte(2 + i % 6).byte(i).byte(1).byte(1);
  }
  MemberInfo self;
  self.instance = id_of(0);
  self.name = "p0";
  Announce announce;
  announce.self = self;
  announce.view = View{5, {9, 9}, {self}, Cause::joined, true};
  announce.epoch = announce.floor = 5;
  Output made_up;
  const auto say = [&](decltype(Message::body) body) {
    const Buffer bytes = wire::encode(Message{"g", std::move(body)});
    made_up.byte(1).byte(8).byte(0).bytes(bytes.span()).byte(0).byte(0).byte(200);
  };
  say(announce);
  say(NewEpoch{*announce.view});
  say(Stale{*announce.view});
  say(Demote{5, id_of(1)});
  say(Expel{5, 6});
  say(Refused{"no"});
  say(Resend{});
  say(Leave{});
  return {formed.take(), busy.take(), made_up.take()};
}

}  // namespace moolink::fuzz
