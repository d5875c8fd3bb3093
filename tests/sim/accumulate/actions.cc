// What the machines of a process want done, and what becomes of it.

#include <algorithm>
#include <cstring>
#include <utility>

#include "accumulate/world.h"
#include "common/program.h"

namespace moolink::sim {

using accumulate::Machine;
using collective::Engine;
using group::Broker;
using group::Member;

namespace {

constexpr int kGroupService = 2;
constexpr int kCollectiveService = 3;

}  // namespace

// True when the process dies instead of sending its next message.
bool World::crashes_now(Process& process) {
  if (process.crash_after < 0 || process.crash_after-- > 0) return false;
  ++coverage["crashes between messages"];
  crash(process.index);
  return true;
}

void World::do_broker(Process& broker) {
  broker.broker->judge(simulation_.now());  // each message has its own turn
  for (auto& action : broker.broker->drain()) {
    if (auto* send = std::get_if<Broker::Send>(&action)) {
      const Uid from = broker.instance;
      deliver(kBroker, send->instance, kGroupService, [this, from, bytes = send->bytes](int to) {
        process(to).member->received(simulation_.now(), from, bytes.span());
      });
    }
  }
}

void World::perform(Process& process, const Member::Action& action) {
  const Uid from = process.instance;
  const auto group_message = [this, from](const Buffer& bytes) {
    return [this, from, bytes](int to) {
      Process& target = this->process(to);
      if (to == kBroker) {
        target.broker->received(simulation_.now(), from, bytes.span());
      } else {
        target.member->received(simulation_.now(), from, bytes.span());
      }
    };
  };
  if (const auto* announce = std::get_if<Member::SendToBroker>(&action)) {
    deliver(process.index, process.broker_instance, kGroupService, group_message(announce->bytes));
  } else if (const auto* relay = std::get_if<Member::SendToMember>(&action)) {
    deliver(process.index, relay->instance, kGroupService, group_message(relay->bytes));
  } else if (const auto* made = std::get_if<Member::NewView>(&action)) {
    simulation_.note(process.name + " gets " + group::describe(*made->view));
    ++coverage[made->view->soft ? "soft views" : "hard views"];
    // A young lineage yields to an older one: what was trained in it is lost.
    const Uid before = std::exchange(process.lineage, made->view->lineage);
    if (before && before != made->view->lineage) process.disturbed = true;
    if (process.made) {
      process.machine->view(simulation_.now(), made->view);
    } else {
      process.view = made->view;
    }
  } else if (std::holds_alternative<Member::Evicted>(action)) {
    simulation_.note(process.name + " was evicted");
    ++coverage["evictions"];
    process.disturbed = true;
    process.view.reset();
    if (process.made) process.machine->evicted(simulation_.now());
  }
}

void World::perform(Process& process, const Engine::Action& action) {
  const int index = process.index;
  if (const auto* send = std::get_if<Engine::Send>(&action)) {
    if (crashes_now(process)) return;
    const Uid from = process.instance;
    deliver(index, send->instance, kCollectiveService,
            [this, from, payload = send->payload](int to) {
              this->process(to).engine->received(from, payload);
            });
  } else if (const auto* sum = std::get_if<Engine::Sum>(&action)) {
    // Arithmetic runs on another thread; whatever happens meanwhile, it comes to its end.
    on(index, simulation_.between(Duration(0), milliseconds(1)), [this, index, sum = *sum] {
      collective::run(sum.work);
      this->process(index).engine->summed(sum.op, sum.run, sum.id);
    });
  } else if (const auto* done = std::get_if<Engine::Done>(&action)) {
    const auto [epoch, round] = process.reductions.at(done->op);
    process.reductions.erase(done->op);
    if (!done->error) {
      // In every other epoch as if through a segment: into memory that is this process's alone.
      const bool exclusive = epoch % 2 == 0;
      Buffer result = done->tensor;
      if (exclusive) {
        const MutableBuffer own = HeapAllocator().allocate(result.size());
        std::memcpy(own.data(), result.data(), result.size());
        result = own;
      }
      process.machine->reduced(simulation_.now(), epoch, round, result, exclusive);
    } else {
      require(done->error.code == ErrorCode::group_changed, done->error.message);
    }
  }
}

void World::perform(Process& process, const accumulate::Action& action) {
  const Time now = simulation_.now();
  if (const auto* send = std::get_if<accumulate::Send>(&action)) {
    if (crashes_now(process)) return;
    const Uid from = process.instance;
    deliver(process.index, send->instance, send->service,
            [this, from, service = send->service, payload = send->payload](int to) {
              Process& target = this->process(to);
              if (target.made) target.machine->received(simulation_.now(), from, service, payload);
            });
  } else if (const auto* enter = std::get_if<accumulate::EnterEpoch>(&action)) {
    process.learner->entered_epoch();
    const std::uint64_t epoch = enter->members->epoch;
    if (epoch != 0) {
      ++coverage["epochs entered"];
      simulation_.note(process.name + " enters epoch " + std::to_string(epoch));
    }
    Error changed;
    changed.code = ErrorCode::group_changed;
    process.engine->set_members(enter->members, changed);
  } else if (const auto* reduction = std::get_if<accumulate::Reduce>(&action)) {
    reduce(process, *reduction);
  } else if (const auto* dropped = std::get_if<accumulate::Dropped>(&action)) {
    require(process.disturbed, process.name + " dropped contributions though nothing befell it");
    ++coverage["drops"];
    process.learner->dropped(dropped->k);
  } else if (const auto* lost = std::get_if<accumulate::Lost>(&action)) {
    ++coverage["losses named"];
    for (const auto& contribution : lost->contributions) {
      const int owner = index_of(contribution.instance);
      require(owner < 0 || this->process(owner).disturbed, "a living peer's contribution is lost");
      lost_[{contribution.instance, contribution.k}][process.instance] =
          process.learner->installed();
    }
  } else if (const auto* demote = std::get_if<accumulate::Demote>(&action)) {
    ++coverage["demotions asked for"];
    const int whom = index_of(demote->instance);
    const bool observer = whom >= 0 && this->process(whom).learner->habits().observer;
    const std::string name = whom >= 0 ? this->process(whom).name : "a peer that is gone";
    require(!peace_ || observer, process.name + " has " + name + " demoted without a fault");
    simulation_.note(process.name + " asks to demote " + name);
    process.member->ask_demotion(now, demote->instance);
  } else if (const auto* activate = std::get_if<accumulate::Activate>(&action)) {
    process.member->activate(now, activate->epoch);
  } else if (const auto* has = std::get_if<accumulate::HasState>(&action)) {
    process.member->set_has_state(now, has->has_state);
  } else if (const auto* stale = std::get_if<accumulate::StaleFrame>(&action)) {
    const int from = index_of(stale->instance);
    if (from >= 0) {
      process.member->check_frame(now, stale->instance, this->process(from).name, stale->epoch);
    }
  } else if (const auto* failed = std::get_if<accumulate::Failed>(&action)) {
    require(false, process.name + " failed: " + failed->error.message);
  } else if (const auto* log = std::get_if<accumulate::Log>(&action)) {
    simulation_.note(process.name + ": " + log->text);
  }
}

void World::reduce(Process& process, const accumulate::Reduce& reduction) {
  // The leader waits for those who keep up: results that wait never exceed their slots, but for
  // cuts that were under way when a member caught up.
  const std::uint64_t bound = 2 * setting_.parallel_gradients + 1;
  process.learner->knows(reduction.epoch, reduction.round);
  require(!process.learner->contributed_in_epoch() || !process.machine->connected() ||
              reduction.round <= process.learner->version() + bound,
          process.name + " has more results waiting than slots");
  ++coverage["reductions"];
  collective::OpSpec spec;
  spec.dtype = tensor::DType::int64;
  spec.shape = {static_cast<std::int64_t>(setting_.elements)};
  spec.contributors = reduction.contributors;
  Engine::Options options;
  options.number = reduction.round;
  options.written = reduction.written;
  const auto op = process.engine->start("round", std::move(spec), reduction.inputs, options);
  process.reductions[op] = {reduction.epoch, reduction.round};
}

}  // namespace moolink::sim
