#include "collective/schedule.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/random.h"
#include "check.h"

namespace schedule_test {

using moolink::Random;
using moolink::collective::chain_ranges;
using moolink::collective::doubling;
using moolink::collective::Range;
using moolink::collective::Schedule;
using moolink::collective::schedule_for;
using moolink::collective::star;
using moolink::collective::Step;
using moolink::collective::tree;

// Of one host.
struct Chain {
  Range range;
  std::vector<Step> steps;
};
using Chains = std::vector<Chain>;

Chains trees(std::uint64_t count, std::uint32_t hosts, std::uint32_t host) {
  Chains chains;
  for (const Range& range : chain_ranges(count, 4, hosts)) {
    chains.push_back({range, tree(hosts, host, static_cast<std::uint32_t>(chains.size()) % hosts)});
  }
  return chains;
}

// Runs the schedules of all hosts with expressions instead of numbers: "(0+1)" is the sum of hosts
// 0 and 1 in this order. Which host goes on, and in which chain, is drawn at random.
class Executor {
 public:
  Executor(std::vector<Chains> schedules, std::uint64_t seed)
      : schedules_(std::move(schedules)), random_(seed), sent_(schedules_.size(), 0) {
    for (std::uint32_t host = 0; host < schedules_.size(); ++host) {
      for (std::uint32_t id = 0; id < schedules_[host].size(); ++id) {
        places_.push_back({host, id, &schedules_[host][id], 0, std::to_string(host), {}});
      }
    }
  }

  // Whether all steps could be done.
  bool run() {
    while (true) {
      std::vector<Place*> ready;
      bool unfinished = false;
      for (Place& place : places_) {
        if (place.step == place.chain->steps.size()) continue;
        unfinished = true;
        const Step& step = place.chain->steps[place.step];
        const bool receives = step.kind == Step::Kind::reduce || step.kind == Step::Kind::store;
        if (!receives || messages_.contains(key(step.peer, place.host, place.id, step))) {
          ready.push_back(&place);
        }
      }
      if (ready.empty()) return !unfinished && messages_.empty();
      go_on(*ready[random_.below(ready.size())]);
    }
  }

  // The expression of the chain's elements at the host.
  std::optional<std::string> result(std::uint32_t host, std::uint32_t chain) const {
    for (const Place& place : places_) {
      if (place.host == host && place.id == chain) return place.result;
    }
    return {};
  }
  std::uint64_t sent(std::uint32_t host) const { return sent_[host]; }

 private:
  using Key = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;
  struct Place {
    std::uint32_t host;
    std::uint32_t id;
    const Chain* chain;
    std::size_t step;
    std::string value;
    std::optional<std::string> result;
  };

  static Key key(std::uint32_t from, std::uint32_t to, std::uint32_t chain, const Step& step) {
    return {from, to, chain, step.round};
  }

  void go_on(Place& place) {
    const Step& step = place.chain->steps[place.step++];
    if (step.kind == Step::Kind::send) {
      const Key name = key(place.host, step.peer, place.id, step);
      CHECK(!messages_.contains(name) && step.peer != place.host);
      messages_[name] = place.value;
      sent_[place.host] += place.chain->range.count();
      return;
    }
    if (step.kind == Step::Kind::finish) {
      place.result = place.value;
      return;
    }
    const Key name = key(step.peer, place.host, place.id, step);
    const std::string theirs = messages_.at(name);
    messages_.erase(name);
    if (step.kind == Step::Kind::store) {
      place.result = place.value = theirs;
    } else {
      place.value = step.theirs_first ? "(" + theirs + "+" + place.value + ")"
                                      : "(" + place.value + "+" + theirs + ")";
    }
  }

  std::vector<Chains> schedules_;
  Random random_;
  std::vector<std::uint64_t> sent_;
  std::vector<Place> places_;
  std::map<Key, std::string> messages_;
};

// Every host once.
bool is_whole(const std::string& expression, std::uint32_t hosts) {
  std::map<std::string, int> seen;
  std::string number;
  for (const char c : expression + ")") {
    if (c >= '0' && c <= '9') {
      number += c;
    } else if (!number.empty()) {
      ++seen[number];
      number.clear();
    }
  }
  bool once = seen.size() == hosts;
  for (const auto& [host, times] : seen) once = once && times == 1;
  return once;
}

template <class Make>
void check_schedules(std::uint32_t hosts, std::uint64_t count, Make make) {
  std::vector<Chains> schedules;
  for (std::uint32_t host = 0; host < hosts; ++host) schedules.push_back(make(host));
  const std::vector<Chains> given = schedules;
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    Executor executor(schedules, seed);
    CHECK(executor.run());
    std::uint64_t covered = 0;
    for (std::uint32_t id = 0; id < given[0].size(); ++id) {
      covered += given[0][id].range.count();
      const auto first = executor.result(0, id);
      CHECK(first && is_whole(*first, hosts));
      for (std::uint32_t host = 1; host < hosts; ++host) {
        CHECK(executor.result(host, id) == first);
      }
    }
    CHECK_EQ(covered, count);
  }
  std::uint64_t at = 0;
  for (const Chain& chain : given[0]) {
    CHECK_EQ(chain.range.begin, at);
    at = chain.range.end;
  }
  CHECK_EQ(at, count);
}

TEST("trees reduce every element once, in any order of delivery") {
  for (std::uint32_t hosts = 1; hosts <= 9; ++hosts) {
    for (const std::uint64_t count : {20000u, 100003u, 1000003u}) {
      check_schedules(hosts, count, [&](std::uint32_t host) { return trees(count, hosts, host); });
    }
  }
  check_schedules(1000, 1000,
                  [&](std::uint32_t host) { return Chains{{{0, 1000}, tree(1000, host, 7)}}; });
}

TEST("only the root of a tree finishes, and a tree takes at most 2 log2 rounds") {
  for (std::uint32_t hosts = 2; hosts <= 40; ++hosts) {
    std::uint32_t rounds = 0;
    while (1u << rounds < hosts) ++rounds;
    for (std::uint32_t root = 0; root < hosts; ++root) {
      for (std::uint32_t host = 0; host < hosts; ++host) {
        const auto finishes = [](const Step& step) { return step.kind == Step::Kind::finish; };
        const std::vector<Step> steps = tree(hosts, host, root);
        CHECK_EQ(std::count_if(steps.begin(), steps.end(), finishes), host == root ? 1 : 0);
        for (const Step& step : steps) CHECK(step.round < 2 * rounds);
      }
    }
  }
}

TEST("along trees, every host sends 2 (hosts - 1) / hosts of the bytes") {
  for (std::uint32_t hosts = 2; hosts <= 9; ++hosts) {
    const std::uint64_t count = 1 << 20;
    std::vector<Chains> schedules;
    for (std::uint32_t host = 0; host < hosts; ++host) {
      schedules.push_back(trees(count, hosts, host));
    }
    const std::uint64_t chains = schedules[0].size();
    Executor executor(std::move(schedules), 1);
    CHECK(executor.run());
    const std::uint64_t least = 2 * (hosts - 1) * count / hosts;
    for (std::uint32_t host = 0; host < hosts; ++host) {
      CHECK(executor.sent(host) <= least + 2 * chains * 16);  // chains begin at cache lines
    }
  }
}

TEST("recursive doubling evaluates one expression at all hosts, beyond powers of two, too") {
  for (std::uint32_t hosts = 1; hosts <= 17; ++hosts) {
    check_schedules(hosts, 1000,
                    [&](std::uint32_t host) { return Chains{{{0, 1000}, doubling(hosts, host)}}; });
  }
}

TEST("a host whose result no other host needs does not send it on") {
  using moolink::collective::sends_result;
  for (const std::uint32_t host : {0u, 1u, 2u, 3u}) CHECK(!sends_result(doubling(4, host)));
  CHECK(sends_result(doubling(3, 0)) && !sends_result(doubling(3, 1)));
  CHECK(sends_result(tree(2, 0, 0)) && !sends_result(tree(2, 1, 0)) &&
        !sends_result(tree(1, 0, 0)));
}

TEST("recursive doubling takes log2 rounds, and two more for those beyond a power of two") {
  for (std::uint32_t hosts = 1; hosts <= 17; ++hosts) {
    std::uint32_t core = 0;
    while (2u << core <= hosts) ++core;
    for (std::uint32_t host = 0; host < hosts; ++host) {
      std::uint32_t received = 0;
      for (const Step& step : doubling(hosts, host)) {
        received += step.kind == Step::Kind::reduce || step.kind == Step::Kind::store ? 1 : 0;
      }
      CHECK(received <= core + 1);
    }
  }
}

TEST("a star reduces in the order of hosts, in two steps") {
  for (std::uint32_t hosts = 1; hosts <= 9; ++hosts) {
    check_schedules(hosts, 1000,
                    [&](std::uint32_t host) { return Chains{{{0, 1000}, star(hosts, host)}}; });
    std::vector<Chains> all;
    for (std::uint32_t host = 0; host < hosts; ++host) all.push_back({{{0, 1}, star(hosts, host)}});
    Executor in_order(std::move(all), 1);
    CHECK(in_order.run());
    std::string expected = "0";
    for (std::uint32_t host = 1; host < hosts; ++host) {
      expected = "(" + expected + "+" + std::to_string(host) + ")";
    }
    CHECK_EQ(*in_order.result(0, 0), expected);
  }
}

TEST("doubling is cheaper than trees up to a size that shrinks with the number of hosts") {
  const auto largest = [](std::uint32_t hosts) {
    std::uint64_t bytes = 1 << 10;
    while (schedule_for(bytes, hosts, false, false) == Schedule::doubling) bytes += 1 << 10;
    return bytes >> 10;
  };
  CHECK(largest(2) > 300 && largest(2) < 600);
  CHECK(largest(4) > 100 && largest(4) < 200);
  CHECK(largest(1000) > 50 && largest(1000) < 70);
  CHECK(schedule_for(100 << 10, 2, true, false) == Schedule::tree);
  CHECK(schedule_for(1 << 10, 2, true, false) == Schedule::doubling);
}

TEST("few members of one host use a star for small payloads") {
  CHECK(schedule_for(64, 2, false, true) == Schedule::doubling);
  CHECK(schedule_for(64, 4, false, true) == Schedule::star);
  CHECK(schedule_for(64, 100, false, true) == Schedule::doubling);
  CHECK(schedule_for(1 << 20, 4, false, true) == Schedule::tree);
}

TEST("the size determines the chains of trees") {
  CHECK(chain_ranges(1 << 15, 4, 3).size() > 1);
  CHECK_EQ(chain_ranges(1 << 24, 4, 2).size(), std::size_t{64});  // of 1 MiB each
  CHECK_EQ(chain_ranges(1 << 18, 4, 2).size(), std::size_t{8});   // of 128 KiB each
}

}  // namespace schedule_test
