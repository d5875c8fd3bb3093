// A broker alone: its answers to messages, and the number of its views.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "check.h"
#include "group/broker.h"
#include "group/messages.h"

namespace moolink::group {
namespace broker_test {

constexpr Time kNow{seconds(100)};

Announce asks_to_join(std::uint64_t id) {
  Announce asks;
  asks.self.instance = Uid{id, id};
  asks.self.name = "p" + std::to_string(id);
  asks.evict_after = seconds(3);
  return asks;
}

void hear(Broker& broker, std::uint64_t from, decltype(Message::body) body,
          const std::string& group = "g") {
  broker.received(kNow, Uid{from, from}, wire::encode(Message{group, std::move(body)}).span());
}

std::vector<Broker::Send> sent(Broker& broker) {
  std::vector<Broker::Send> messages;
  for (Broker::Action& action : broker.drain()) {
    if (auto* send = std::get_if<Broker::Send>(&action)) messages.push_back(std::move(*send));
  }
  return messages;
}

BrokerConfig first_broker() {
  BrokerConfig config;
  config.gather = Duration(0);
  return config;
}

// A broker whose group of peers 1 .. `peers` was founded 10 ms ago.
struct Founded : Broker {
  explicit Founded(std::uint64_t peers, bool stateful = false)
      : Broker(first_broker(), 1, kNow - seconds(1)) {
    for (std::uint64_t id = 1; id <= peers; ++id) {
      Announce asks = asks_to_join(id);
      asks.stateful = stateful;
      received(kNow - seconds(1), Uid{id, id}, wire::encode(Message{"g", asks}).span());
    }
    tick(kNow - milliseconds(10));
    drain();
  }

  // The announcement of a member of the newest view.
  Announce announcement(std::uint64_t id) const {
    Announce announce = asks_to_join(id);
    announce.epoch = announce.floor = view("g")->epoch;
    announce.lineage = view("g")->lineage;
    return announce;
  }
};

}  // namespace broker_test

using namespace broker_test;

TEST("all that comes in one turn makes one view, at once") {
  Founded broker(4);
  CHECK(broker.next_deadline() > kNow);
  hear(broker, 2, Leave{});
  broker.peer_down(kNow, Uid{3, 3}, Down::dead);
  CHECK(sent(broker).empty());
  CHECK_EQ(broker.next_deadline(), kNow);
  broker.tick(kNow);
  CHECK_EQ(sent(broker).size(), 3u);  // p3 may live
  CHECK_EQ(broker.view("g")->members.size(), 2u);
  CHECK(broker.view("g")->cause == Cause::died);
  CHECK(broker.next_deadline() > kNow);
}

TEST("a peer that leaves and comes back in one turn is a new member") {
  Founded broker(2);
  hear(broker, 2, Leave{});
  hear(broker, 2, asks_to_join(2));
  CHECK_EQ(broker.view("g")->members.size(), 1u);
  for (Time now = kNow; now < kNow + seconds(1); now += milliseconds(50)) broker.tick(now);
  CHECK_EQ(broker.view("g")->members.size(), 2u);
  CHECK(broker.view("g")->cause == Cause::joined);
}

TEST("a peer that knows of a member's death joins in the view that leaves the member out") {
  Founded broker(2);
  broker.peer_down(kNow, Uid{2, 2}, Down::dead);
  Announce asks = asks_to_join(3);
  asks.suspected = {{Uid{2, 2}, true}};
  hear(broker, 3, asks);
  broker.tick(kNow);
  for (const Broker::Send& send : sent(broker)) {
    CHECK(std::holds_alternative<NewEpoch>(wire::decode<Message>(send.bytes).body));
  }
  CHECK_EQ(broker.view("g")->members.size(), 2u);
  CHECK(broker.view("g")->find(Uid{3, 3}) != nullptr);
}

TEST("a member's suspicion of another counts once, and its suspicion of itself never") {
  Founded broker(5);
  const auto suspects = [&](std::uint64_t from, std::vector<Suspicion> suspected) {
    Announce announce = broker.announcement(from);
    announce.suspected = std::move(suspected);
    hear(broker, from, announce);
  };
  const Suspicion silent{Uid{5, 5}, false};
  suspects(1, {silent, silent, silent});
  suspects(5, {silent, silent});
  Time now = kNow;
  for (; now < kNow + milliseconds(700); now += milliseconds(50)) broker.tick(now);
  CHECK_EQ(broker.view("g")->members.size(), 5u);
  suspects(2, {silent});
  for (; now < kNow + milliseconds(1500); now += milliseconds(50)) broker.tick(now);
  CHECK_EQ(broker.view("g")->members.size(), 4u);
}

TEST("the last holder keeps the state if the leader that asked to demote it has died") {
  for (const bool dies : {false, true}) {
    Founded broker(2, true);
    for (const std::uint64_t id : {1, 2}) {
      Announce announce = broker.announcement(id);
      announce.stateful = announce.has_state = true;
      hear(broker, id, announce);
    }
    broker.tick(kNow);
    const View before = *broker.view("g");
    hear(broker, 1, Demote{before.epoch, Uid{2, 2}});
    if (dies) broker.peer_down(kNow, Uid{1, 1}, Down::dead);
    broker.tick(kNow);
    const View* after = broker.view("g");
    CHECK(after->epoch > before.epoch && after->lineage == before.lineage);
    CHECK(after->find(Uid{2, 2})->role == (dies ? Role::member : Role::newcomer));
  }
}

TEST("a broker takes so many groups and no more, and says so to who asks") {
  BrokerConfig config = first_broker();
  config.most_groups = 3;
  Broker broker(config, 1, kNow);
  for (int i = 0; i < 3; ++i) hear(broker, 1, asks_to_join(1), "g" + std::to_string(i));
  CHECK(sent(broker).empty());
  hear(broker, 1, asks_to_join(1), "one more");
  const auto refusals = sent(broker);
  CHECK_EQ(broker.groups().size(), 3u);
  CHECK_EQ(refusals.size(), 1u);
  const auto refusal = wire::decode<Message>(refusals.at(0).bytes);
  CHECK(std::get<Refused>(refusal.body).reason.find("3 groups already") != std::string::npos);
  CHECK_THROWS(hear(broker, 1, asks_to_join(1), std::string(5000, 'x')), ErrorCode::wire);
}

TEST("nobody lists more peers than any group has") {
  Broker broker(BrokerConfig{}, 1, kNow);
  Announce lists = asks_to_join(1);
  lists.gaps.resize(16384);
  hear(broker, 1, lists);
  lists.gaps.resize(16385);
  CHECK_THROWS(hear(broker, 1, lists), ErrorCode::wire);
  lists.gaps.clear();
  lists.suspected.resize(16385);
  CHECK_THROWS(hear(broker, 1, lists), ErrorCode::wire);
}

TEST("nobody announces for another") {
  Broker broker(BrokerConfig{}, 1, kNow);
  hear(broker, 1, asks_to_join(2));
  for (Time now = kNow; now < kNow + seconds(3); now += milliseconds(50)) broker.tick(now);
  CHECK(sent(broker).empty());
}

}  // namespace moolink::group
