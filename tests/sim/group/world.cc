#include "group/world.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/program.h"

namespace moolink::sim {

using group::Broker;
using group::Down;
using group::Member;
using group::View;

namespace {

constexpr const char* kGroup = "g";
constexpr Duration kNodeEvictAfter = seconds(3);

[[noreturn]] void violate(const Process& process, const std::string& what) {
  throw Violation(process.name + ": " + what);
}

}  // namespace

World::World(std::uint64_t seed, WorldOptions options, bool trace)
    : random_(seed), options_(options), trace_(trace) {
  processes_.push_back(std::make_unique<Process>());
  process(kBroker).name = "broker";
}

// ---- events

void World::push(Time time, int process_index, std::function<void()> action) {
  const std::uint64_t incarnation = process_index < 0 ? 0 : process(process_index).incarnation;
  events_.push({time, sequence_++, process_index, incarnation, std::move(action)});
}

void World::at(Duration delay, std::function<void()> action) {
  push(now_ + delay, -1, std::move(action));
}

void World::on(int index, Duration delay, std::function<void()> action) {
  push(now_ + delay, index, std::move(action));
}

void World::run_for(Duration duration) {
  const Time end = now_ + duration;
  while (!events_.empty() && events_.top().time <= end) {
    Event event = events_.top();
    events_.pop();
    now_ = event.time;
    fire(std::move(event));
  }
  now_ = end;
}

void World::fire(Event event) {
  if (event.process < 0) {
    event.action();
    return;
  }
  Process& process = this->process(event.process);
  if (!process.alive || process.incarnation != event.incarnation) return;
  if (now_ < process.frozen_until) {
    process.backlog.push_back(std::move(event.action));
    return;
  }
  event.action();
  if (process.alive) pump(event.process);
}

void World::note(int index, std::string_view what, std::uint64_t detail) {
  trace_.add(static_cast<std::uint64_t>(now_.time_since_epoch().count()));
  trace_.add(static_cast<std::uint64_t>(index));
  trace_.add(what);
  trace_.add(detail);
  if (!trace_.printing()) return;
  trace_.print(now_, process(index).name + "  " + std::string(what) + " " + std::to_string(detail));
}

int World::index_of(const Uid& instance) const {
  for (const auto& process : processes_) {
    if (process->alive && process->instance == instance) return process->index;
  }
  return -1;
}

// A message reaches the instance it was sent to or nobody, after those sent before it.
void World::deliver(int from, int to, const Uid& to_instance, std::string_view kind,
                    std::function<void()> action) {
  Link& link = this->link(from, to);
  const Duration delay =
      random_.chance(1, 20) ? ms(5, 100) : microseconds(50 + random_.below(3000));
  link.last_delivery = std::max(link.last_delivery, now_ + delay);
  const Uid from_instance = process(from).instance;
  const auto arrive = [=, this, kind = std::string(kind)] {
    const Process& sender = process(from);
    if (process(to).instance != to_instance) return;
    if (!sender.alive || sender.instance != from_instance) return;
    note(to, kind, static_cast<std::uint64_t>(from));
    action();
  };
  push(link.last_delivery, to, [=, this] {
    Link& at_arrival = this->link(from, to);
    if (!blocked(from, to)) {
      arrive();
    } else if (!at_arrival.lossy) {
      at_arrival.stalled.emplace_back(arrive);
    }
  });
}

// The partition of a link may have ended: what it held arrives now.
void World::release(int from, int to) {
  if (blocked(from, to)) return;
  for (auto& arrival : std::exchange(link(from, to).stalled, {})) {
    push(now_, to, std::move(arrival));
  }
}

// ---- processes

int World::add_peer(bool observer) {
  processes_.push_back(std::make_unique<Process>());
  const int index = peers();
  process(index).index = index;
  process(index).name = "p" + std::to_string(index);
  process(index).observer = observer;
  start(index);
  return index;
}

void World::start(int index) {
  Process& process = this->process(index);
  if (process.alive) return;
  process.alive = true;
  ++process.incarnation;
  process.instance = Uid::random(random_);
  process.frozen_until = Time::min();
  process.backlog.clear();
  process.tick_at = kNever;
  process.connected = {};
  process.truth = {};
  process.last_epoch = 0;
  process.lost_session_in = 0;
  process.evictions = 0;
  process.evicted_at = Time(Duration(0));
  note(index, "start");
  if (index == kBroker) {
    process.broker = std::make_unique<Broker>(group::BrokerConfig{}, random_.next(), now_);
    for (const int peer : live_peers()) {
      connect_broker(peer, ms(5, static_cast<std::uint64_t>(options_.reconnect_ms)));
    }
  } else {
    group::MemberConfig config;
    config.group = kGroup;
    config.self.instance = process.instance;
    config.self.name = process.name;
    config.self.role = process.observer ? group::Role::observer : group::Role::member;
    config.stateful = options_.stateful;
    process.member = std::make_unique<Member>(config, now_);
    process.member->hold_soft_views(options_.hold_soft_views);
    connect_broker(index, ms(1, 100));
    on(index, ms(1, 50), [this, index] { send_frames(index); });
    if (options_.stateful && !process.observer) {
      on(index, ms(1, 50), [this, index] { seek_state(index); });
    }
  }
  schedule_tick(process);
}

void World::crash(int index) {
  Process& process = this->process(index);
  if (!process.alive) return;
  note(index, "crash");
  process.alive = false;
  for (int other = 0; other <= peers(); ++other) {
    if (other == index || !this->process(other).alive) continue;
    const bool proof = random_.below(100) < static_cast<std::uint64_t>(options_.proof_of_death);
    tell_down(other, index, proof ? Down::dead : Down::unreachable,
              proof ? ms(1, 50) : kNodeEvictAfter + ms(0, 100));
  }
  process.member.reset();
  process.broker.reset();
}

void World::leave(int index) {
  Process& process = this->process(index);
  if (!process.alive || now_ < process.frozen_until) return;
  note(index, "leave");
  process.member->leave(now_);
  pump(index);
  on(index, ms(0, 100), [this, index] {
    Process& leaver = this->process(index);
    leaver.alive = false;
    for (int other = 0; other <= peers(); ++other) {
      if (other != index && this->process(other).alive) {
        tell_down(other, index, Down::closed, ms(1, 20));
      }
    }
    leaver.member.reset();
  });
}

// A stopped process may run again: what it missed happens now.
void World::wake(int index) {
  Process& process = this->process(index);
  if (now_ < process.frozen_until) return;
  for (auto& action : std::exchange(process.backlog, {})) push(now_, index, std::move(action));
}

// What the node of a stopped process and those of its peers make of it.
void World::freeze(int index, Duration duration) {
  Process& process = this->process(index);
  if (!process.alive) return;
  note(index, "freeze", static_cast<std::uint64_t>(duration.count()));
  process.frozen_until = std::max(process.frozen_until, now_ + duration);
  at(duration, [=, this] { wake(index); });
  for (int other = 0; other <= peers(); ++other) {
    if (other == index) continue;
    if (duration > kNodeEvictAfter) {
      const Uid instance = process.instance;
      at(kNodeEvictAfter + ms(0, 100), [=, this] {
        if (this->process(index).instance == instance && now_ < this->process(index).frozen_until) {
          tell_down(other, index, Down::unreachable, ms(0, 10));
        }
      });
      tell_up(other, index, duration + ms(1, 50));
    }
    if (index != kBroker && other != kBroker && duration > seconds(1) && random_.chance(1, 2)) {
      // A node that wakes may believe for a moment that the others were silent.
      on(index, milliseconds(1), [=, this, since = now_] {
        if (now_ - since < seconds(1)) return;
        tell_down(index, other, Down::unreachable, Duration(0));
        tell_up(index, other, ms(50, 900));
      });
    }
  }
}

void World::partition(int a, int b, Duration duration) {
  note(a, "partition", static_cast<std::uint64_t>(b));
  const bool lossy = duration > kNodeEvictAfter && random_.chance(1, 2);
  for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
    Link& link = this->link(from, to);
    link.blocked_until = std::max(link.blocked_until, now_ + duration);
    link.lossy = lossy;
    at(duration, [this, from = from, to = to] { release(from, to); });
    if (duration <= kNodeEvictAfter) continue;
    at(kNodeEvictAfter + ms(0, 100), [this, from = from, to = to] {
      if (blocked(from, to)) tell_down(from, to, Down::unreachable, ms(0, 10));
    });
    tell_up(from, to, duration + ms(1, 50));
  }
}

void World::isolate(int index, Duration duration) {
  for (int other = 0; other <= peers(); ++other) {
    if (other != index) partition(index, other, duration);
  }
}

void World::heal() {
  for (auto& [ends, link] : links_) {
    if (link.blocked_until <= now_) continue;
    link.blocked_until = now_;
    link.lossy = false;
    release(ends.first, ends.second);
  }
  for (const auto& process : processes_) {
    if (!process->alive || process->frozen_until <= now_) continue;
    process->frozen_until = now_;
    wake(process->index);
  }
  for (int observer = 0; observer <= peers(); ++observer) {
    for (int found = 0; found <= peers(); ++found) {
      if (observer != found) tell_up(observer, found, ms(1, 50));
    }
  }
}

// ---- what the node below tells

void World::connect_broker(int index, Duration delay) {
  on(index, delay, [this, index] {
    Process& peer = process(index);
    const Process& broker = process(kBroker);
    if (!broker.alive || peer.connected == broker.instance) return;
    if (blocked(index, kBroker) || now_ < broker.frozen_until) {
      connect_broker(index, ms(50, 200));
      return;
    }
    peer.connected = broker.instance;
    note(index, "broker up");
    peer.member->broker_up(now_, broker.instance);
  });
}

void World::tell_down(int observer, int lost, Down how, Duration delay) {
  tell_down(observer, lost, process(lost).instance, how, delay);
}

// A proof of death that comes late is still of the instance that died, not of its successor.
void World::tell_down(int observer, int lost, const Uid& instance, Down how, Duration delay) {
  on(observer, delay, [=, this] {
    Process& process = this->process(observer);
    if (how == Down::dead && blocked(observer, lost)) {
      // No proof comes through a cut link.
      tell_down(observer, lost, instance, how, ms(20, 200));
      return;
    }
    note(observer, "peer down", static_cast<std::uint64_t>(lost));
    if (observer == kBroker) {
      process.broker->peer_down(now_, instance, how);
    } else if (lost != kBroker) {
      const View& view = *process.member->view();
      const bool lives = this->process(lost).alive && this->process(lost).instance == instance;
      if (lives && view.find(instance) != nullptr) process.lost_session_in = view.epoch;
      process.member->peer_down(now_, instance, how);
      if (lives && how == Down::unreachable) tell_up(observer, lost, ms(50, 900));
    } else if (process.connected == instance) {
      process.connected = {};
      process.member->broker_down(now_);
      connect_broker(observer, ms(10, 200));
    }
  });
}

void World::tell_up(int observer, int found, Duration delay) {
  if (!process(observer).alive || !process(found).alive) return;
  const Uid instance = process(found).instance;
  on(observer, delay, [=, this] {
    const Process& other = process(found);
    if (!other.alive || other.instance != instance || blocked(observer, found)) return;
    if (now_ < other.frozen_until || observer == kBroker) return;
    note(observer, "peer up", static_cast<std::uint64_t>(found));
    if (found == kBroker) {
      connect_broker(observer, ms(10, 200));
    } else {
      process(observer).member->peer_up(now_, instance);
    }
  });
}

// ---- driving the machines

void World::schedule_tick(Process& process) {
  const Time due =
      process.broker ? process.broker->next_deadline() : process.member->next_deadline();
  if (due == kNever) return;
  const Time time = std::max(now_, due) + microseconds(random_.below(1000));
  if (process.tick_at > now_ && process.tick_at <= time) return;
  process.tick_at = time;
  push(time, process.index, [this, &process, time] {
    if (process.tick_at != time) return;  // a later plan replaced this one
    process.tick_at = kNever;
    if (process.broker) process.broker->tick(now_);
    if (process.member) process.member->tick(now_);
  });
}

void World::pump(int index) {
  Process& process = this->process(index);
  if (process.member) pump_member(process);
  if (process.broker) pump_broker(process);
  schedule_tick(process);
}

void World::pump_member(Process& process) {
  const int index = process.index;
  for (auto& action : process.member->drain()) {
    if (auto* send = std::get_if<Member::SendToBroker>(&action)) {
      const Uid from = process.instance;
      deliver(index, kBroker, process.connected, "announce",
              [this, from, bytes = send->bytes] { receive_group(kBroker, from, bytes); });
    } else if (auto* relay = std::get_if<Member::SendToMember>(&action)) {
      const int to = index_of(relay->instance);
      if (to < 0) continue;
      const Uid from = process.instance;
      deliver(index, to, relay->instance, "stale",
              [this, to, from, bytes = relay->bytes] { receive_group(to, from, bytes); });
    } else if (auto* made = std::get_if<Member::NewView>(&action)) {
      note(index, "view", made->view->epoch);
      ++coverage[std::string("views: ") + group::kCauses[made->view->cause]];
      check_view(process, *made->view);
      if (!process.member->has_state()) process.truth = {};
      if (!made->active) {
        on(index, ms(20, 400), [this, index, epoch = made->view->epoch] {
          this->process(index).member->activate(now_, epoch);
        });
      }
    } else if (auto* evicted = std::get_if<Member::Evicted>(&action)) {
      note(index, "evicted", evicted->epoch);
      ++coverage["evictions"];
      ++process.evictions;
      process.evicted_at = now_;
      process.truth = {};
    }
  }
  check_process(process);
}

void World::pump_broker(Process& process) {
  for (auto& action : process.broker->drain()) {
    if (auto* send = std::get_if<Broker::Send>(&action)) {
      const int to = index_of(send->instance);
      if (to < 0) continue;
      const Uid from = process.instance;
      deliver(kBroker, to, send->instance, "from broker",
              [this, to, from, bytes = send->bytes] { receive_group(to, from, bytes); });
    } else if (auto* log = std::get_if<Broker::Log>(&action)) {
      trace_.print(now_, "broker  " + log->text);
    }
  }
}

void World::receive_group(int index, const Uid& from, const Buffer& bytes) {
  Process& process = this->process(index);
  if (process.broker) {
    process.broker->received(now_, from, bytes.span());
    return;
  }
  process.member->received(now_, from, bytes.span());
  const auto message = wire::decode<group::Message>(bytes);
  const View* view = nullptr;
  if (auto* made = std::get_if<group::NewEpoch>(&message.body)) view = &made->view;
  if (auto* stale = std::get_if<group::Stale>(&message.body)) view = &stale->view;
  if (view == nullptr || view->find(process.instance) != nullptr) return;
  if (process.member->active() && process.member->active_view()->epoch < view->epoch) {
    violate(process, "active after it saw the later " + describe(*view));
  }
}

}  // namespace moolink::sim
