#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "group/broker.h"
#include "group/member.h"
#include "group/messages.h"

namespace moolink::group {
namespace lineage_test {

constexpr Time kFirstTime{seconds(100)};
constexpr Uid kBroker{50, 50};
constexpr Uid kOld{1001, 0};
constexpr Uid kYoung{1002, 0};

MemberInfo info_of(std::uint64_t id) {
  MemberInfo info;
  info.instance = Uid{id, id};
  info.name = "p" + std::to_string(id);
  return info;
}

View view_of(std::uint64_t id, const Uid& lineage, std::uint64_t epoch) {
  View view;
  view.epoch = epoch;
  view.lineage = lineage;
  view.members = {info_of(id)};
  return view;
}

// What the only member of a lineage announces.
Announce announced(std::uint64_t id, const Uid& lineage, Duration age, std::uint64_t epoch) {
  Announce announce;
  announce.self = info_of(id);
  announce.stateful = announce.has_state = true;
  announce.lineage = lineage;
  announce.lineage_age = age;
  announce.epoch = announce.floor = epoch;
  announce.evict_after = seconds(3);
  announce.view = view_of(id, lineage, epoch);
  return announce;
}

void hear(Broker& broker, Time now, const Announce& announce) {
  broker.received(now, announce.self.instance, wire::encode(Message{"g", announce}).span());
}

void run(Broker& broker, Time from, Time to) {
  for (Time now = from; now < to; now += milliseconds(50)) broker.tick(now);
}

}  // namespace lineage_test

using namespace lineage_test;

TEST("of two lineages a broker that restarted goes on from the older one") {
  const Announce old = announced(1, kOld, seconds(8), 2);
  const Announce young = announced(2, kYoung, seconds(1), 3);
  for (const bool old_first : {true, false}) {
    Broker broker({}, 1, kFirstTime);
    hear(broker, kFirstTime, old_first ? old : young);
    hear(broker, kFirstTime, old_first ? young : old);
    run(broker, kFirstTime, kFirstTime + seconds(2));
    CHECK_EQ(broker.view("g")->lineage, kOld);
  }
}

TEST("a lineage that a broker did not make itself yields to an older one that comes later") {
  Broker broker({}, 1, kFirstTime);
  hear(broker, kFirstTime, announced(2, kYoung, seconds(1), 3));
  run(broker, kFirstTime, kFirstTime + seconds(2));
  CHECK_EQ(broker.view("g")->lineage, kYoung);
  hear(broker, kFirstTime + seconds(2), announced(1, kOld, seconds(8), 2));
  CHECK_EQ(broker.view("g")->lineage, kOld);
}

TEST("a lineage yields to no younger one, nor to any once it is old itself") {
  for (const Duration age : {seconds(8), seconds(20)}) {
    Broker broker({}, 1, kFirstTime);
    hear(broker, kFirstTime, announced(1, kOld, age, 2));
    run(broker, kFirstTime, kFirstTime + seconds(1) + milliseconds(100));
    const Duration other = age == seconds(8) ? seconds(1) : seconds(60);
    hear(broker, kFirstTime + seconds(1) + milliseconds(100), announced(2, kYoung, other, 3));
    CHECK_EQ(broker.view("g")->lineage, kOld);
  }
}

TEST("a broker does not go on from a view of another lineage than its peer announces") {
  Broker broker({}, 1, kFirstTime);
  hear(broker, kFirstTime, announced(2, kYoung, seconds(1), 3));
  run(broker, kFirstTime, kFirstTime + seconds(2));
  Announce lying = announced(1, kOld, seconds(8), 2);
  lying.view->lineage = Uid{1003, 0};
  hear(broker, kFirstTime + seconds(2), lying);
  CHECK_EQ(broker.view("g")->lineage, kYoung);
}

TEST("a member tells how old its lineage is, whoever told it") {
  MemberConfig config;
  config.group = "g";
  config.self = info_of(1);
  Member member(config, kFirstTime);
  member.broker_up(kFirstTime, kBroker);
  const NewEpoch made{view_of(1, kOld, 5), seconds(7)};
  member.received(kFirstTime, kBroker, wire::encode(Message{"g", made}).span());
  member.drain();
  const Time later = kFirstTime + seconds(2);
  member.tick(later);
  member.check_frame(later, Uid{2, 2}, "p2", 4);
  std::vector<Duration> ages;
  for (const Member::Action& action : member.drain()) {
    if (const auto* sent = std::get_if<Member::SendToBroker>(&action)) {
      ages.push_back(std::get<Announce>(wire::decode<Message>(sent->bytes).body).lineage_age);
    } else if (const auto* relayed = std::get_if<Member::SendToMember>(&action)) {
      ages.push_back(std::get<Stale>(wire::decode<Message>(relayed->bytes).body).lineage_age);
    }
  }
  CHECK_EQ(ages.size(), 2u);
  for (const Duration age : ages) CHECK(age == seconds(9));
}

TEST("an age that no lineage can have is cut") {
  Broker broker({}, 1, kFirstTime);
  hear(broker, kFirstTime, announced(1, kOld, Duration::max(), 2));
  hear(broker, kFirstTime, announced(2, kYoung, Duration::min(), 3));
  run(broker, kFirstTime, kFirstTime + seconds(2));
  CHECK_EQ(broker.view("g")->lineage, kOld);
}

}  // namespace moolink::group
