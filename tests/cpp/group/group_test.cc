// What the simulator does not look at: the wording of refusals, the single steps of a member, names
// that collide, observers, and the messages' bytes.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "group/broker.h"
#include "group/member.h"

namespace moolink::group {
namespace {

const Time kStart{seconds(100)};
const Uid kBrokerInstance{7, 7};

MemberConfig config(std::uint64_t id, const std::string& name) {
  MemberConfig config;
  config.group = "g";
  config.self.instance = Uid{id, id};
  config.self.name = name;
  return config;
}

View make_view(std::uint64_t epoch, const std::vector<std::uint64_t>& ids, bool soft = false) {
  View view;
  view.epoch = epoch;
  view.lineage = Uid{99, 99};
  view.soft = soft;
  for (const std::uint64_t id : ids) {
    MemberInfo& info = view.members.emplace_back();
    info.instance = Uid{id, id};
    info.name = "p" + std::to_string(id);
  }
  return view;
}

Buffer new_epoch(View view) { return wire::encode(Message{"g", NewEpoch{std::move(view)}}); }

template <class Wanted, class Action>
std::vector<Wanted> only(std::vector<Action> actions) {
  std::vector<Wanted> wanted;
  for (Action& action : actions) {
    if (auto* found = std::get_if<Wanted>(&action)) wanted.push_back(std::move(*found));
  }
  return wanted;
}

// A member that is in a view of itself (1) and p2.
Member settled() {
  Member member(config(1, "p1"), kStart);
  member.broker_up(kStart, kBrokerInstance);
  member.received(kStart, kBrokerInstance, new_epoch(make_view(5, {1, 2})).span());
  member.drain();
  return member;
}

BrokerConfig first_broker() { return {.gather = Duration(0)}; }

// Members wired to one broker without any delay.
class Wired {
 public:
  Member& add(MemberConfig config) {
    members_.push_back(std::make_unique<Member>(std::move(config), now_));
    members_.back()->broker_up(now_, kBrokerInstance);
    return *members_.back();
  }
  void remove(std::size_t index) { members_.at(index).reset(); }
  void silence(std::size_t index) { silent_ = index; }
  void end_silence() { silent_.reset(); }
  void run(Duration duration) {
    for (const Time end = now_ + duration; now_ < end; now_ += milliseconds(10)) step();
  }
  // The broker alone runs: it hears nobody.
  void run_broker(Duration duration) {
    for (const Time end = now_ + duration; now_ < end; now_ += milliseconds(10)) {
      broker_.tick(now_);
    }
  }
  Broker& broker() { return broker_; }
  Time now() const { return now_; }

 private:
  void step() {
    broker_.tick(now_);
    for (const auto& member : members_) {
      if (!member) continue;
      member->tick(now_);
      for (const auto& sent : only<Member::SendToBroker>(member->drain())) {
        if (silent_ && member == members_.at(*silent_)) continue;
        broker_.received(now_, member->config().self.instance, sent.bytes.span());
      }
    }
    for (const auto& sent : only<Broker::Send>(broker_.drain())) {
      for (const auto& member : members_) {
        if (member && member->config().self.instance == sent.instance) {
          member->received(now_, kBrokerInstance, sent.bytes.span());
        }
      }
    }
  }

  Time now_ = kStart;
  Broker broker_{first_broker(), 1, kStart};
  std::vector<std::unique_ptr<Member>> members_;
  std::optional<std::size_t> silent_;  // who is not heard
};

TEST("messages say whom they concern") {
  CHECK(recipient_of(wire::encode(Message{"g", Announce{}}).span()).broker);
  CHECK(recipient_of(wire::encode(Message{"g", Leave{}}).span()).broker);
  CHECK(recipient_of(wire::encode(Message{"g", Demote{}}).span()).broker);
  CHECK(!recipient_of(new_epoch(make_view(1, {1})).span()).broker);
  CHECK(!recipient_of(wire::encode(Message{"other", Expel{}}).span()).broker);
  CHECK_EQ(recipient_of(wire::encode(Message{"other", Expel{}}).span()).group, "other");
  CHECK_THROWS(recipient_of({}), ErrorCode::wire);
}

TEST("a message of more than any group needs is refused before it is read") {
  constexpr std::size_t kMost = std::size_t{16} << 20;
  const auto message = [](std::size_t bytes) {
    return wire::encode(Message{std::string(bytes, 'g'), Leave{}});
  };
  CHECK_THROWS(recipient_of(message(kMost).span()), ErrorCode::wire);
  CHECK(recipient_of(message(kMost - 100).span()).broker);
}

TEST("a view that no broker can have made is not gone on from") {
  for (const auto& ids : {std::vector<std::uint64_t>{1, 1}, std::vector<std::uint64_t>{2, 3}}) {
    Broker broker(first_broker(), 1, kStart);
    Announce announce;
    announce.self = config(1, "p1").self;
    announce.epoch = 5;
    announce.view = make_view(5, ids);
    announce.view->members.front().role = Role::observer;
    broker.received(kStart, Uid{1, 1}, wire::encode(Message{"g", announce}).span());
    for (Time now = kStart; now < kStart + seconds(15); now += milliseconds(50)) broker.tick(now);
    for (const auto& sent : only<Broker::Send>(broker.drain())) {
      const auto message = wire::decode<Message>(sent.bytes.span());
      CHECK(!std::holds_alternative<NewEpoch>(message.body));
    }
  }
}

TEST("a view that a member has made up does not shut out those of the broker") {
  const std::uint64_t huge = ~std::uint64_t{0};
  for (const std::vector<std::uint64_t>& ids : {std::vector<std::uint64_t>{1, 2}, {2}}) {
    Member member = settled();
    for (const Message& lie : {Message{"g", Stale{make_view(huge, ids)}},
                               Message{"g", NewEpoch{make_view(huge, ids)}}}) {
      member.received(kStart, Uid{2, 2}, wire::encode(lie).span());
    }
    CHECK(member.drain().empty());
    member.received(kStart, Uid{2, 2}, new_epoch(make_view(6, {1, 2})).span());  // passed on
    CHECK_EQ(only<Member::NewView>(member.drain()).size(), 1u);
    // A broker that has taken over may have raised the epoch by any number.
    member.received(kStart, kBrokerInstance, new_epoch(make_view(huge / 2, {1, 2})).span());
    CHECK_EQ(only<Member::NewView>(member.drain()).size(), 1u);
  }
  Member joining(config(1, "p1"), kStart);
  joining.broker_up(kStart, kBrokerInstance);
  joining.received(kStart, Uid{2, 2}, new_epoch(make_view(huge, {2})).span());
  joining.received(kStart, kBrokerInstance, new_epoch(make_view(7, {1, 2})).span());
  CHECK_EQ(only<Member::NewView>(joining.drain()).size(), 1u);
}

TEST("malformed messages throw and change nothing") {
  Member member = settled();
  Buffer bytes = new_epoch(make_view(6, {1}));
  CHECK_THROWS(member.received(kStart, kBrokerInstance, bytes.span().first(bytes.size() - 1)),
               ErrorCode::wire);
  CHECK_EQ(member.view()->epoch, 5u);
}

TEST("ranks go by sort order, then by order of joining, observers last") {
  Wired wired;
  MemberConfig late = config(1, "late");
  late.self.sort = 3;
  MemberConfig watcher = config(2, "watcher");
  watcher.self.role = Role::observer;
  watcher.self.sort = -5;
  const Member& first = wired.add(late);
  wired.add(watcher);
  wired.run(milliseconds(20));
  wired.add(config(3, "b"));
  wired.run(milliseconds(20));
  wired.add(config(4, "a"));
  wired.run(seconds(1));
  const View view = *first.active_view();
  CHECK_EQ(view.members.size(), 4u);
  CHECK_EQ(view.participants(), 3u);
  CHECK(view.rank_of(Uid{3, 3}) == 0u);
  CHECK(view.rank_of(Uid{4, 4}) == 1u);
  CHECK(view.rank_of(Uid{1, 1}) == 2u);
  CHECK(view.rank_of(Uid{2, 2}) == 3u);
  CHECK(view.members[3].role == Role::observer);
  CHECK(!view.rank_of(Uid{5, 5}).has_value());
}

TEST("a changed sort order makes a soft view") {
  Wired wired;
  Member& first = wired.add(config(1, "p1"));
  wired.add(config(2, "p2"));
  wired.run(seconds(1));
  CHECK(first.active_view()->rank_of(Uid{1, 1}) == 0u);
  first.set_sort_order(wired.now(), 10);
  wired.run(seconds(1));
  CHECK(first.active_view()->rank_of(Uid{1, 1}) == 1u);
  CHECK(first.active_view()->cause == Cause::ordered);
  CHECK(first.active_view()->soft);
}

TEST("a name is refused while its holder answers, and taken over when it does not") {
  Wired wired;
  wired.add(config(1, "same"));
  wired.run(seconds(1));
  const Member& second = wired.add(config(2, "same"));
  wired.run(milliseconds(500));
  CHECK(!second.active());
  CHECK(second.waiting_for().find("the name 'same' is taken") != std::string::npos);
  wired.remove(0);
  wired.run(milliseconds(1300));  // well before the holder would be evicted for its silence
  CHECK(second.active());
  CHECK_EQ(second.active_view()->members.size(), 1u);
  CHECK(second.waiting_for().empty());
}

TEST("one broker keeps many groups apart") {
  Wired wired;
  MemberConfig other = config(2, "p2");
  other.group = "h";
  const Member& g = wired.add(config(1, "p1"));
  const Member& h = wired.add(other);
  wired.run(seconds(1));
  CHECK_EQ(g.active_view()->members.size(), 1u);
  CHECK_EQ(h.active_view()->members.size(), 1u);
  CHECK(wired.broker().groups() == (std::vector<std::string>{"g", "h"}));
  CHECK(*wired.broker().view("h") == *h.active_view());
  CHECK(wired.broker().view("i") == nullptr);
}

TEST("a leaver is out at once and does nothing any more") {
  Wired wired;
  const Member& first = wired.add(config(1, "p1"));
  Member& second = wired.add(config(2, "p2"));
  wired.run(seconds(1));
  CHECK_EQ(first.active_view()->members.size(), 2u);
  second.leave(wired.now());
  wired.run(milliseconds(30));
  CHECK_EQ(first.active_view()->members.size(), 1u);
  CHECK(first.active_view()->cause == Cause::left);
  CHECK(second.left());
  CHECK(!second.active());
  CHECK(second.next_deadline() == kNever);
}

TEST("a held soft view is pending until it is activated, a hard one is not held") {
  Member member = settled();
  member.hold_soft_views(true);
  member.received(kStart, kBrokerInstance, new_epoch(make_view(6, {1, 2, 3}, true)).span());
  const auto made = only<Member::NewView>(member.drain());
  CHECK_EQ(made.size(), 1u);
  CHECK(!made.at(0).active);
  CHECK_EQ(member.active_view()->epoch, 5u);
  CHECK_EQ(member.view()->epoch, 6u);
  CHECK(member.check_frame(kStart, Uid{2, 2}, "p2", 5) == FrameEpoch::current);
  CHECK(member.check_frame(kStart, Uid{3, 3}, "p3", 6) == FrameEpoch::pending);
  member.activate(kStart, 5);  // of a view that was replaced meanwhile: nothing
  CHECK_EQ(member.active_view()->epoch, 5u);
  member.activate(kStart, 6);
  CHECK_EQ(member.active_view()->epoch, 6u);
  member.received(kStart, kBrokerInstance, new_epoch(make_view(7, {1, 2})).span());
  CHECK_EQ(member.active_view()->epoch, 7u);
}

TEST("a frame of an older epoch is answered with the view, not too often") {
  Member member = settled();
  CHECK(member.check_frame(kStart, Uid{2, 2}, "p2", 4) == FrameEpoch::older);
  CHECK(member.check_frame(kStart, Uid{2, 2}, "p2", 4) == FrameEpoch::older);
  const auto answers = only<Member::SendToMember>(member.drain());
  CHECK_EQ(answers.size(), 1u);
  CHECK_EQ(answers.at(0).name, "p2");
  const auto message = wire::decode<Message>(answers.at(0).bytes);
  CHECK(std::get<Stale>(message.body).view == *member.view());
  CHECK(member.check_frame(kStart + seconds(1), Uid{2, 2}, "p2", 4) == FrameEpoch::older);
  CHECK_EQ(only<Member::SendToMember>(member.drain()).size(), 1u);
}

TEST("a frame ahead of its view makes the member ask at once") {
  Member member = settled();
  CHECK(member.check_frame(kStart, Uid{2, 2}, "p2", 6) == FrameEpoch::newer);
  CHECK(member.next_deadline() <= kStart);
  member.tick(kStart);
  CHECK_EQ(only<Member::SendToBroker>(member.drain()).size(), 1u);
}

TEST("a frame of this epoch from a peer outside the view is refused") {
  Member member = settled();
  CHECK(member.check_frame(kStart, Uid{3, 3}, "p3", 5) == FrameEpoch::older);
  CHECK(member.check_frame(kStart, Uid{2, 2}, "p2", 5) == FrameEpoch::current);
}

TEST("EXPEL is void for another epoch, and its floor keeps old views out") {
  Member member = settled();
  member.received(kStart, kBrokerInstance, wire::encode(Message{"g", Expel{4, 9}}).span());
  CHECK(member.active());
  member.received(kStart, Uid{8, 8}, wire::encode(Message{"g", Expel{5, 9}}).span());
  CHECK(member.active());  // not from its broker
  member.received(kStart, kBrokerInstance, wire::encode(Message{"g", Expel{5, 9}}).span());
  CHECK(!member.active());
  CHECK_EQ(only<Member::Evicted>(member.drain()).size(), 1u);
  member.received(kStart, Uid{2, 2},
                  wire::encode(Message{"g", Stale{make_view(9, {1, 2})}}).span());
  CHECK(!member.active());
  member.received(kStart, kBrokerInstance, new_epoch(make_view(10, {1, 2})).span());
  CHECK(member.active());
}

TEST("without a broker a member goes on, and says for whom it waits") {
  Member member = settled();
  CHECK(member.waiting_for().empty());
  member.broker_down(kStart);
  CHECK(member.active());
  CHECK(member.waiting_for().empty());
  member.peer_down(kStart, Uid{2, 2}, Down::dead);
  CHECK(member.active());
  CHECK(member.waiting_for().find("lost 'p2'") != std::string::npos);
  CHECK(only<Member::SendToBroker>(member.drain()).empty());
  member.peer_up(kStart, Uid{2, 2});
  CHECK(member.waiting_for().empty());
}

TEST("a broker that hears nobody evicts nobody, and who comes back late has time to") {
  Wired wired;
  wired.add(config(1, "p1"));
  wired.add(config(2, "p2"));
  wired.run(seconds(1));
  const View before = *wired.broker().view("g");
  CHECK_EQ(before.members.size(), 2u);
  wired.run_broker(seconds(8));
  CHECK_EQ(*wired.broker().view("g"), before);
  wired.silence(1);
  wired.run(milliseconds(2500));
  wired.end_silence();
  wired.run(seconds(4));
  CHECK_EQ(*wired.broker().view("g"), before);
}

// The only one left is heard by fits and starts; that must not keep the dead in the group.
TEST("who is not heard after an outage goes, though there are more outages") {
  Wired wired;
  wired.add(config(1, "p1"));
  wired.add(config(2, "p2"));
  wired.run(seconds(1));
  CHECK_EQ(wired.broker().view("g")->members.size(), 2u);
  wired.remove(1);
  for (int outage = 0; outage < 8; ++outage) {
    wired.run_broker(milliseconds(1300));
    wired.run(milliseconds(700));
  }
  CHECK_EQ(wired.broker().view("g")->members.size(), 1u);
}

TEST("a member that is not reached is tried again each second") {
  Member member = settled();
  member.peer_down(kStart, Uid{2, 2}, Down::unreachable);
  member.tick(kStart + milliseconds(900));
  CHECK(only<Member::SendToMember>(member.drain()).empty());
  member.tick(kStart + seconds(1));
  const auto probes = only<Member::SendToMember>(member.drain());
  CHECK_EQ(probes.size(), 1u);
  CHECK_EQ(probes.at(0).name, "p2");
  CHECK(std::holds_alternative<Probe>(wire::decode<Message>(probes.at(0).bytes).body));
  member.tick(kStart + milliseconds(1900));
  CHECK(only<Member::SendToMember>(member.drain()).empty());
  member.tick(kStart + seconds(2));
  CHECK_EQ(only<Member::SendToMember>(member.drain()).size(), 1u);
  member.peer_up(kStart + seconds(2), Uid{2, 2});
  member.tick(kStart + seconds(4));
  CHECK(only<Member::SendToMember>(member.drain()).empty());
}

TEST("who was without the broker tries the others before it suspects them") {
  Member member = settled();
  Time now = kStart;
  member.broker_down(now);
  member.peer_down(now, Uid{2, 2}, Down::unreachable);
  const auto suspected = [&] {
    const auto announced = only<Member::SendToBroker>(member.drain());
    CHECK(!announced.empty());
    return std::get<Announce>(wire::decode<Message>(announced.back().bytes).body).suspected.size();
  };
  member.drain();
  member.broker_up(now += milliseconds(100), kBrokerInstance);
  const auto actions = member.drain();
  CHECK_EQ(only<Member::SendToMember>(actions).size(), 1u);
  const Time armed = now + member.config().evict_after;
  while (now < armed) {
    member.tick(now += milliseconds(250));
    CHECK_EQ(suspected(), now < armed ? 0u : 1u);
  }
}

TEST("what cannot be delivered to the dead does not take the proof of their death back") {
  Member member = settled();
  member.peer_down(kStart, Uid{2, 2}, Down::dead);
  member.peer_down(kStart, Uid{2, 2}, Down::unreachable);
  member.drain();
  member.tick(kStart + milliseconds(300));
  const auto sent = only<Member::SendToBroker>(member.drain());
  CHECK(sent.size() == 1);
  const auto message = wire::decode<Message>(sent.front().bytes.span());
  const std::vector<Suspicion> suspected{{Uid{2, 2}, true}};
  CHECK(std::get<Announce>(message.body).suspected == suspected);
}

TEST("the state is lost with a demotion and kept through an older newcomer's role") {
  MemberConfig stateful = config(1, "p1");
  stateful.stateful = true;
  Member member(stateful, kStart);
  member.broker_up(kStart, kBrokerInstance);
  View view = make_view(5, {2, 1});
  view.members[1].role = Role::newcomer;
  view.members[1].since = 5;
  member.received(kStart, kBrokerInstance, new_epoch(view).span());
  CHECK(!member.has_state());
  member.set_has_state(kStart, true);
  view.epoch = 6;  // made before the broker heard of it
  member.received(kStart, kBrokerInstance, new_epoch(view).span());
  CHECK(member.has_state());
  view.epoch = 7;
  view.members[1].since = 7;
  member.received(kStart, kBrokerInstance, new_epoch(view).span());
  CHECK(!member.has_state());
}

TEST("GroupChanged names who came and went") {
  const Error error =
      group_changed("g", "all_reduce 'x'", make_view(5, {1, 2}), make_view(6, {1, 3}));
  CHECK(error.code == ErrorCode::group_changed);
  CHECK_EQ(error.function, "g");
  CHECK(error.message.find("gone: p2; new: p3") != std::string::npos);
  const Error out = group_changed("g", "all_reduce", make_view(5, {1, 2}), View{});
  CHECK(out.message.find("no longer in the group") != std::string::npos);
}

}  // namespace
}  // namespace moolink::group
