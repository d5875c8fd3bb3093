// A broker and members of a group that reduce: values, small and large tensors; rounds of an
// accumulator.

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <thread>

#include "runtime/group/accumulator_peer.h"
#include "runtime/group/broker_peer.h"
#include "runtime/group/group_peer.h"
#include "scenario.h"
#include "scenarios.h"

namespace moolink::injection {
namespace {

using runtime::AccumulatorPeer;
using runtime::BrokerPeer;
using runtime::Future;
using runtime::GroupPeer;

constexpr Duration kTimeout = seconds(12);
using Paths = std::vector<wire::PathKind>;
constexpr std::size_t kMembers = 2;

struct BrokerProcess : Process {
  BrokerProcess(Report& reports, const Paths& paths) : Process(reports, "broker", paths) {
    if (!peer) return;
    attempt(report, "a broker", [&] {
      group::BrokerConfig config;
      config.gather = Duration(0);
      broker = std::make_unique<BrokerPeer>(peer, config);
    });
    attempt(report, "listen()", [&] { address = peer->listen("127.0.0.1:0").at(0); });
  }
  ~BrokerProcess() {
    attempt(report, "close()", [&] {
      if (broker) broker->close();
    });
    faults::inside([&] { broker.reset(); });
  }

  std::unique_ptr<BrokerPeer> broker;
  std::string address;
};

struct MemberProcess : Process {
  MemberProcess(Report& reports, const std::string& name, const std::string& broker,
                const Paths& paths)
      : Process(reports, name, paths) {
    if (!peer) return;
    attempt(report, "connect()", [&] { peer->connect(broker); });
    attempt(report, "a group", [&] { group = std::make_shared<GroupPeer>(peer, "group"); });
    if (group) attempt(report, "set_timeout()", [&] { group->set_timeout(seconds(3)); });
  }
  ~MemberProcess() {
    if (group) attempt(report, "close()", [&] { group->close(); });
    faults::inside([&] { group.reset(); });
  }

  std::shared_ptr<GroupPeer> group;
};

template <class Member>
bool all_there(const std::vector<std::unique_ptr<Member>>& members) {
  std::uint64_t epoch = 0;
  bool all = true;
  for (const auto& member : members) {
    attempt(member->report, "update()", [&] { (void)member->group->update(); });
    const group::View& view = member->group->view();
    all = all && view.members.size() == members.size() && (epoch == 0 || epoch == view.epoch);
    epoch = view.epoch;
  }
  return all;
}

template <class Member>
bool gather(Report& report, const std::vector<std::unique_ptr<Member>>& members) {
  const Time deadline = io::now() + kTimeout;
  while (io::now() < deadline) {
    if (all_there(members)) return true;
    std::this_thread::sleep_for(milliseconds(2));
  }
  report.complain("the members did not come together");
  return false;
}

// In memory that the others of the host may map.
Buffer numbers(GroupPeer& group, std::size_t count, float value) {
  const MutableBuffer memory = group.rpc()->context()->lending().allocate(count * sizeof(float));
  auto* elements = reinterpret_cast<float*>(memory.data());
  for (std::size_t i = 0; i < count; ++i) elements[i] = value + static_cast<float>(i % 5);
  return memory;
}

bool is_sum(const Buffer& result, std::size_t count, std::size_t members) {
  if (result.size() != count * sizeof(float)) return false;
  const auto* elements = reinterpret_cast<const float*>(result.data());
  const auto many = static_cast<float>(members);
  for (std::size_t i = 0; i < count; ++i) {
    if (elements[i] != many * (1 + static_cast<float>(i % 5))) return false;
  }
  return true;
}

std::variant<wire::Payload, Error> first_of(const std::vector<wire::Payload>& values) {
  return values.front();
}

using Members = std::vector<std::unique_ptr<MemberProcess>>;

// Waits for all; the members whose operation ended well.
std::size_t end(Report& report, const std::string& what,
                const std::vector<std::shared_ptr<Future>>& futures,
                const std::function<bool(const wire::Payload&)>& is_right) {
  std::size_t well = 0;
  const bool some_lack = std::ranges::count(futures, nullptr) != 0;
  for (const auto& future : futures) {
    if (!future) continue;
    bool ended = false;
    attempt(report, "wait()", [&] { ended = future->wait(io::now() + kTimeout, {}); });
    if (!ended) {
      report.complain(what + " did not end");
    } else if (const auto* error = std::get_if<Error>(&future->outcome())) {
      // The others learn of it by the change of the group.
      const bool told = error->code == ErrorCode::group_changed ||
                        (error->code == ErrorCode::timeout && some_lack);
      if (!told || !faults::fired()) {
        check_error(report, what.c_str(), *error);
      }
    } else if (!is_right(std::get<wire::Payload>(future->outcome()))) {
      report.complain(what + " has a wrong result");
    } else {
      ++well;
    }
  }
  return well;
}

// A member whose begin() threw has told its user; the others wait for it, and say so.
template <class Begin>
std::vector<std::shared_ptr<Future>> begin_all(Report& report, const Members& members,
                                               const char* what, const Begin& begin) {
  std::vector<std::shared_ptr<Future>> futures;
  for (const auto& member : members) {
    std::shared_ptr<Future> future;
    try {
      future = begin(*member->group);
    } catch (const Exception& e) {
      const bool outdated =
          e.error().code == ErrorCode::group_changed || e.error().code == ErrorCode::closed;
      if (!outdated || !faults::fired()) check_error(report, what, e.error());
    } catch (const std::exception& e) {
      check_error(report, what, make_error(ErrorCode::error, e.what()));
    }
    futures.push_back(std::move(future));
  }
  return futures;
}

std::size_t reduce(Report& report, const Members& members, const std::string& name,
                   std::size_t count) {
  const auto futures = begin_all(report, members, name.c_str(), [&](GroupPeer& group) {
    collective::OpSpec spec;
    spec.shape = {static_cast<std::int64_t>(count)};
    const Buffer input = numbers(group, count, 1);
    const MutableBuffer output = HeapAllocator().allocate(input.size());
    return faults::inside(
        [&] { return group.collective(name, spec, input, output, false, false); });
  });
  return end(report, name, futures, [&](const wire::Payload& result) {
    return result.parts.size() == 1 && is_sum(result.parts.front(), count, members.size());
  });
}

std::size_t reduce_value(Report& report, const Members& members, const std::string& name) {
  const auto futures = begin_all(report, members, name.c_str(), [&](GroupPeer& group) {
    wire::Payload value = payload_of(5, 100);
    return faults::inside(
        [&] { return group.all_reduce_value(name, std::move(value), first_of, false); });
  });
  return end(report, name, futures,
             [](const wire::Payload& result) { return is_payload_of(result, 5, 100); });
}

template <class Member>
std::vector<std::unique_ptr<Member>> join(Report& report, const BrokerProcess& broker,
                                          const Paths& paths) {
  std::vector<std::unique_ptr<Member>> members;
  while (members.size() < kMembers) {
    const std::string name = "member" + std::to_string(members.size());
    members.push_back(std::make_unique<Member>(report, name, broker.address, paths));
    if (!members.back()->group) return {};
  }
  return members;
}

void run_group(Report& report, const Paths& paths) {
  BrokerProcess broker(report, paths);
  if (broker.address.empty()) return;
  const Members members = join<MemberProcess>(report, broker, paths);
  if (members.empty() || !gather(report, members)) return;
  constexpr std::size_t kCounts[] = {16, 20000, 500000, 500000, 500000};  // the last ones are lent
  for (const std::size_t count : kCounts) {
    reduce(report, members, "sum" + std::to_string(count), count);
  }
  reduce_value(report, members, "value");
  // A fault may come as late as in one of these: then the next one is right.
  for (int tried = 0; tried < 3; ++tried) {
    if (!gather(report, members)) return;
    const bool fired = faults::fired();
    const std::string name = "after" + std::to_string(tried);
    if (reduce(report, members, name, kCounts[1]) == members.size()) return;
    if (fired && tried == 2) report.complain("operations after the fault failed");
  }
}

// --- rounds

constexpr std::size_t kElements = 3000;
constexpr std::uint64_t kRounds = 6;

struct Learner : MemberProcess {
  Learner(Report& reports, const std::string& name, const std::string& broker, const Paths& paths)
      : MemberProcess(reports, name, broker, paths), model(kElements, 0.0F) {
    if (!group) return;
    attempt(report, "an accumulator", [&] {
      AccumulatorPeer::Options options;
      options.name = "model";
      options.sections = {{tensor::DType::float32, kElements}};
      accumulator = std::make_unique<AccumulatorPeer>(group, options);
    });
    if (!accumulator) return;
    attempt(report, "settings", [&] {
      accumulator->set_virtual_batch_size(2);
      accumulator->set_parallel_gradients(2);
    });
  }
  ~Learner() {
    if (accumulator) attempt(report, "close()", [&] { accumulator->close(); });
    faults::inside([&] { accumulator.reset(); });
  }

  std::span<std::byte> bytes() { return std::as_writable_bytes(std::span(model)); }

  wire::Payload state() {
    const MutableBuffer body = HeapAllocator().allocate(bytes().size());
    std::memcpy(body.data(), model.data(), body.size());
    return {body, {}};
  }

  // What a training loop does between two batches.
  void step(std::map<std::uint64_t, std::vector<float>>& history) {
    faults::inside([&] {
      (void)group->update();
      accumulator->update(AccumulatorPeer::OnDivergence::raise);
    });
    if (accumulator->wants_state()) {
      wire::Payload current = state();
      faults::inside([&] { accumulator->set_state(std::move(current)); });
    } else if (accumulator->has_new_state()) {
      const auto next = faults::inside([&] { return accumulator->new_state(); });
      if (!next) return;
      std::memcpy(model.data(), next->state.body.data(), bytes().size());
      faults::inside([&] { accumulator->state_installed(next->number); });
    } else if (accumulator->has_result()) {
      apply(history);
    } else if (accumulator->wants_gradients()) {
      const MutableBuffer bucket = faults::inside([&] { return accumulator->bucket(); });
      auto* gradient = reinterpret_cast<float*>(bucket.data());
      for (std::size_t i = 0; i < kElements; ++i) {
        gradient[i] = 0.1F * static_cast<float>(i % 7) + model[i] * 0.01F;
      }
      accumulate::Counters counters{{"steps", 1}};
      faults::inside([&] { accumulator->offer(1, std::move(counters)); });
    }
  }

  void apply(std::map<std::uint64_t, std::vector<float>>& history) {
    const MutableBuffer result = faults::inside([&] { return accumulator->take_result(); });
    if (result.size() != bytes().size()) return;
    const auto* gradient = reinterpret_cast<const float*>(result.data());
    for (std::size_t i = 0; i < kElements; ++i) model[i] -= gradient[i];
    const std::uint64_t version = accumulator->model_version();
    const auto [known, first] = history.try_emplace(version, model);
    if (known->second != model) {
      report.complain("round " + std::to_string(version) + " differs between members");
    }
    applied = version;
    release();
  }

  // The round was applied: what fails here fails before anything has changed, and is tried again.
  void release() {
    attempt(report, "release_result()", [&] { accumulator->release_result(); });
  }

  std::vector<float> model;
  std::unique_ptr<AccumulatorPeer> accumulator;
  std::uint64_t applied = 0;
};

void run_rounds(Report& report, const Paths& paths) {
  BrokerProcess broker(report, paths);
  if (broker.address.empty()) return;
  const auto members = join<Learner>(report, broker, paths);
  if (members.empty()) return;
  std::map<std::uint64_t, std::vector<float>> history;
  const auto done = [&] {
    std::size_t many = 0;
    for (const auto& member : members) {
      many += member->applied >= kRounds && member->accumulator->connected() ? 1 : 0;
    }
    return many == members.size();
  };
  const Time deadline = io::now() + kTimeout;
  bool failed = false;
  while (!done() && io::now() < deadline && !failed) {
    for (const auto& member : members) {
      if (!member->accumulator) return;
      try {
        member->step(history);
        faults::inside([&] { member->accumulator->wait(io::now() + milliseconds(1), {}); });
      } catch (const std::exception& e) {
        check_error(report, "a step", make_error(ErrorCode::error, e.what()));
      }
    }
  }
  if (!done()) report.complain("the rounds did not go on");
}

// Through shared memory where that is of use, or over messages alone.
const Paths& all_paths() {
  static const Paths paths = {wire::PathKind::shm, wire::PathKind::tcp};
  return paths;
}
const Paths& tcp_alone() {
  static const Paths paths = {wire::PathKind::tcp};
  return paths;
}

}  // namespace

void group_over_shm(Report& report) { run_group(report, all_paths()); }
void group_over_tcp(Report& report) { run_group(report, tcp_alone()); }
void rounds_over_shm(Report& report) { run_rounds(report, all_paths()); }
void rounds_over_tcp(Report& report) { run_rounds(report, tcp_alone()); }

}  // namespace moolink::injection
