#pragma once

// Engines of several members, and what is under way between them, for tests.

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "collective/engine.h"
#include "collective/shared_pipeline.h"

namespace moolink::collective {

template <class T>
Buffer buffer(const std::vector<T>& values) {
  const MutableBuffer memory = HeapAllocator().allocate(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(memory.data(), values.data(), memory.size());
  return memory;
}

template <class T>
std::vector<T> values_of(const Buffer& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Some engines, and messages between them that arrive in order for each pair and else at random.
class Members {
 public:
  // `hosts`: each one's, by number; empty: all are on one.
  explicit Members(std::size_t count, std::uint64_t seed = 1,
                   const std::vector<std::uint64_t>& hosts = {},
                   const std::vector<std::uint32_t>& observers = {})
      : random_(seed) {
    std::vector<EpochMembers::Member> list;
    for (std::uint32_t i = 0; i < count; ++i) {
      const bool observes = std::ranges::find(observers, i) != observers.end();
      list.push_back({{1, i + 1},
                      "peer-" + std::to_string(i),
                      hosts.empty() ? Uid{} : Uid{2, hosts[i]},
                      observes});
      Engine::Config config;
      config.scope = "group";
      config.self = list[i].instance;
      engines_.push_back(std::make_unique<Engine>(std::move(config)));
    }
    members_ = EpochMembers(1, std::move(list));
    enter(1);
  }

  void enter(std::uint64_t epoch, std::optional<std::size_t> only = {}) {
    members_.epoch = epoch;
    Error reason;
    reason.code = ErrorCode::group_changed;
    reason.message = "epoch " + std::to_string(epoch);
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      if (only && *only != i) continue;
      engines_[i]->set_members(std::make_shared<const EpochMembers>(members_), reason);
      drain(i);
    }
  }

  OpId start(std::size_t i, const std::string& name, OpSpec spec, std::vector<Buffer> inputs,
             Engine::Options options = {}) {
    const OpId id = engines_[i]->start(name, std::move(spec), std::move(inputs), options);
    drain(i);
    return id;
  }

  OpId start_value(std::size_t i, const std::string& name, const std::string& text) {
    wire::Writer writer;
    writer(text);
    const OpId id = engines_[i]->start_value(name, {writer.take(), {}}, {});
    drain(i);
    return id;
  }

  void inputs_written(std::size_t i) {
    engines_[i]->inputs_written();
    drain(i);
  }

  void cancel(std::size_t i, OpId id, Error error) {
    engines_[i]->cancel(id, std::move(error));
    drain(i);
  }

  bool ask_why(std::size_t i, OpId id, const Error& error) {
    const bool asked = engines_[i]->ask_why(id, error);
    drain(i);
    return asked;
  }

  // Those of each host share a segment of this epoch; without hosts, all of them one.
  void share_memory() {
    pipelines_.clear();
    pipelines_.resize(engines_.size());
    for (const std::vector<std::uint32_t>& ranks : members_.hosts.ranks) {
      const PipelineLayout layout{members_.epoch, static_cast<std::uint32_t>(ranks.size()), 2,
                                  kWindowBytes};
      const MutableBuffer segment = HeapAllocator().allocate(PipelineSegment::bytes_of(layout));
      std::memset(segment.data(), 0, segment.size());
      PipelineSegment::initialise(segment.span(), layout);
      for (std::uint32_t i = 0; i < ranks.size(); ++i) {
        pipelines_[ranks[i]] = std::make_unique<SharedPipeline>(
            PipelineSegment(segment.owner(), segment.span(), layout), i, heap_);
        engines_[ranks[i]]->use_shared_memory(members_.epoch);
      }
    }
  }
  void on_one_host() { members_.one_host = true; }

  // Delivers until nothing is under way, or until `steps` deliveries or steps of pipelines.
  void settle(std::size_t steps = ~std::size_t{0}) {
    for (; steps > 0; --steps) {
      bool worked = false;
      for (std::size_t i = 0; i < pipelines_.size(); ++i) {
        if (pipelines_[i] == nullptr) continue;  // a guest
        worked |= random_.chance(1, 2) && pipelines_[i]->step();
        for (auto& sum : pipelines_[i]->take_sums()) {
          engines_[i]->summed_here(std::move(sum));
          drain(i);
        }
        for (const auto& ended : pipelines_[i]->take_ended()) {
          if (!ended.abandoned) engines_[i]->passed(ended.s);
          drain(i);
        }
      }
      if (worked && random_.chance(1, 2)) continue;
      std::vector<std::pair<std::size_t, std::size_t>> pairs;
      for (const auto& [pair, queue] : wire_) {
        if (!queue.empty()) pairs.push_back(pair);
      }
      if (pairs.empty() && !pipelines_.empty() && is_stepping()) continue;
      if (pairs.empty()) return;
      const auto pair = pairs[random_.below(pairs.size())];
      const wire::Payload payload = std::move(wire_[pair].front());
      wire_[pair].pop_front();
      CHECK_EQ(wire::Reader(payload.body).text(), "group");
      engines_[pair.second]->received(members_[pair.first].instance, payload);
      drain(pair.second);
    }
  }

  // As if that member had sent it.
  void receive(std::size_t i, std::size_t from, const wire::Payload& payload) {
    engines_[i]->received(members_[from].instance, payload);
    drain(i);
  }

  const Engine::Done* done(std::size_t i, OpId id) const {
    const auto found = done_.find({i, id});
    return found == done_.end() ? nullptr : &found->second;
  }
  Engine& engine(std::size_t i) { return *engines_[i]; }
  void on_combine(std::function<std::variant<wire::Payload, Error>(std::vector<wire::Payload>)> f) {
    combine_ = std::move(f);
  }
  void drop_messages() { wire_.clear(); }
  std::size_t passed() const { return passed_; }
  std::size_t bytes_between_hosts() const {
    std::size_t all = 0;
    for (const auto& [sender, bytes] : between_hosts_) all += bytes;
    return all;
  }
  std::size_t bytes_between_hosts_from(std::size_t i) const { return between_hosts_.at(i); }

 private:
  bool is_stepping() {
    bool worked = false;
    for (const auto& pipeline : pipelines_) worked |= pipeline != nullptr && pipeline->step();
    return worked;
  }

  void drain(std::size_t i) {
    for (auto& action : engines_[i]->take_actions()) {
      if (auto* send = std::get_if<Engine::Send>(&action)) {
        for (std::size_t j = 0; j < engines_.size(); ++j) {
          if (members_[j].instance != send->instance) continue;
          wire_[{i, j}].push_back(send->payload);
          const bool leaves = members_[i].host_key != members_[j].host_key;
          for (const Buffer& part : send->payload.parts) between_hosts_[i] += leaves * part.size();
        }
      } else if (auto* sum = std::get_if<Engine::Sum>(&action)) {
        run(sum->work);
        engines_[i]->summed(sum->op, sum->run, sum->id);
        drain(i);
      } else if (auto* combine = std::get_if<Engine::Combine>(&action)) {
        engines_[i]->combined(combine->op, combine->run, combine_(std::move(combine->payloads)));
        drain(i);
      } else if (auto* pass = std::get_if<Engine::Pass>(&action)) {
        pipelines_[i]->start(std::move(pass->operation));
        ++passed_;
      } else if (auto* publish = std::get_if<Engine::Publish>(&action)) {
        pipelines_[i]->publish(publish->s, publish->chunk, std::move(publish->result));
      } else if (auto* abandon = std::get_if<Engine::Abandon>(&action)) {
        pipelines_[i]->abandon(abandon->s);
      } else {
        auto& done = std::get<Engine::Done>(action);
        const auto id = done.op;
        CHECK(done_.emplace(std::pair{i, id}, std::move(done)).second);
      }
    }
  }

  Random random_;
  HeapAllocator heap_;
  EpochMembers members_;
  std::vector<std::unique_ptr<SharedPipeline>> pipelines_;
  std::size_t passed_ = 0;
  std::map<std::size_t, std::size_t> between_hosts_;  // by sender
  std::vector<std::unique_ptr<Engine>> engines_;
  std::map<std::pair<std::size_t, std::size_t>, std::deque<wire::Payload>> wire_;
  std::map<std::pair<std::size_t, OpId>, Engine::Done> done_;
  std::function<std::variant<wire::Payload, Error>(std::vector<wire::Payload>)> combine_;
};

inline OpSpec floats(std::int64_t count, ReduceOp op = ReduceOp::sum) {
  OpSpec spec;
  spec.op = op;
  spec.shape = {count};
  return spec;
}

}  // namespace moolink::collective
