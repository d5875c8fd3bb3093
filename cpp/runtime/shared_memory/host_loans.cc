#include "runtime/shared_memory/host_loans.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "wire/archive.h"

namespace moolink::runtime {
namespace {

// Of one rank. A lender's further segments pass through windows.
constexpr std::size_t kMaxSegments = 256;

}  // namespace

struct HostLoans::Message {
  enum class Kind : std::uint8_t { lent, mapped, returned };
  friend constexpr Kind enum_max(Kind) { return Kind::returned; }

  std::string scope;
  Kind kind = Kind::lent;
  std::uint64_t epoch = 0;
  std::uint64_t number = 0;
  Uid key;  // lent

  auto fields() { return std::tie(scope, kind, epoch, number, key); }
};

HostLoans::HostLoans(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope)
    : rpc_(std::move(rpc)), group_(std::move(group)), scope_(std::move(scope)) {
  rpc_->router().add(
      rpc::Service::collective, scope_, group_,
      [this](const Uid& from, const wire::Payload& payload) { received(from, payload); });
}

HostLoans::~HostLoans() {
  if (!rpc_->context()->abandoned()) close();
}

void HostLoans::close() {
  if (std::exchange(closed_, true)) return;
  leave();
  rpc_->router().remove(rpc::Service::collective, scope_);
}

void HostLoans::enter(HostSegment::Members members, std::uint32_t rank) {
  leave();
  members_ = std::move(members);
  rank_ = rank;
  retired_ = rpc_->context()->lending().retired();
}

void HostLoans::leave() {
  for (const auto& [number, theirs] : theirs_) {
    if (theirs.segment == nullptr) rpc_->descriptors().forget(theirs.key);
  }
  theirs_.clear();
  mine_.clear();
  members_ = {};
}

// --- the lender

collective::LentPlace HostLoans::place(const std::byte* data, std::size_t size) {
  const memory::LendingPool& pool = rpc_->context()->lending();
  take_back_freed();
  const auto place = pool.find(data, size);
  if (!place || members_.instances.size() < 2) return {};
  auto found = mine_.find(place->segment);
  if (found == mine_.end()) {
    if (mine_.size() >= kMaxSegments) return {};
    Mine mine{Uid::from_entropy(), {}, {}};
    for (std::uint32_t rank = 0; rank < members_.instances.size(); ++rank) {
      if (rank == rank_) continue;
      mine.untold.insert(rank);
      mine.waiting.insert(rank);
    }
    found = mine_.emplace(place->segment, std::move(mine)).first;
  }
  lend(found->first, found->second);
  if (!found->second.waiting.empty()) return {};
  return {place->segment, place->offset};
}

// A member without a connection through shared memory gets the descriptor with a later operation;
// LENT makes the peers connect.
void HostLoans::lend(std::uint64_t number, Mine& mine) {
  if (mine.untold.empty()) return;
  const auto segment = rpc_->context()->lending().segment(number);
  if (segment == nullptr) return;
  const int descriptor = segment->descriptor();
  const std::set<std::uint32_t> asked = mine.untold;
  std::erase_if(mine.untold, [&](std::uint32_t rank) {
    return rpc_->share(members_.instances[rank], mine.key, {&descriptor, 1});
  });
  for (const std::uint32_t rank : asked) {
    send(rank, {{}, Message::Kind::lent, members_.epoch, number, mine.key});
  }
}

void HostLoans::take_back_freed() {
  const memory::LendingPool& pool = rpc_->context()->lending();
  if (retired_ == pool.retired()) return;
  retired_ = pool.retired();
  std::erase_if(mine_, [&](const auto& entry) {
    if (pool.segment(entry.first) != nullptr) return false;
    for (std::uint32_t rank = 0; rank < members_.instances.size(); ++rank) {
      if (rank == rank_) continue;
      send(rank, {{}, Message::Kind::returned, members_.epoch, entry.first, {}});
    }
    return true;
  });
}

void HostLoans::send(std::uint32_t rank, Message message) {
  message.scope = scope_;
  rpc_->send_service_to(members_.instances[rank], members_.names[rank], rpc::Service::collective,
                        {wire::encode(message), {}}, group_);
}

void HostLoans::received(const Uid& from, const wire::Payload& payload) {
  const auto message = wire::decode<Message>(payload.body);
  const auto& instances = members_.instances;
  const auto at = std::find(instances.begin(), instances.end(), from);
  if (message.epoch != members_.epoch || at == instances.end()) return;
  const Number number{static_cast<std::uint32_t>(at - instances.begin()), message.number};
  switch (message.kind) {
    case Message::Kind::lent:
      return borrow(number, message.key);
    case Message::Kind::mapped:
      if (const auto mine = mine_.find(message.number); mine != mine_.end()) {
        mine->second.waiting.erase(number.first);
      }
      return;
    case Message::Kind::returned:
      if (const auto theirs = theirs_.extract(number); theirs && !theirs.mapped().segment) {
        rpc_->descriptors().forget(theirs.mapped().key);
      }
      return;
  }
}

// --- the others

// LENT comes again while the lender cannot pass the descriptor.
void HostLoans::borrow(Number number, const Uid& key) {
  const auto of_this_rank = [&](const auto& entry) { return entry.first.first == number.first; };
  const auto count = std::count_if(theirs_.begin(), theirs_.end(), of_this_rank);
  if (theirs_.contains(number) || static_cast<std::size_t>(count) >= kMaxSegments) return;
  theirs_[number].key = key;
  rpc_->descriptors().expect(key, [this, number, key](std::vector<Descriptor> descriptors) {
    const auto found = theirs_.find(number);
    if (found == theirs_.end() || found->second.key != key) return;
    map(number, std::move(descriptors));
  });
}

void HostLoans::map(Number number, std::vector<Descriptor> descriptors) {
  try {
    if (descriptors.size() != 1) return;
    auto segment = memory::Segment::map_read_only(std::move(descriptors.front()),
                                                  memory::LendingPool::kLargestBlock);
    segment->close_descriptor();
    theirs_[number].segment = std::move(segment);
  } catch (const Exception& e) {
    rpc_->context()->log(LogLevel::warning,
                         "memory that '" + members_.names[number.first] +
                             "' lends is read through windows: " + e.error().message);
    return;
  }
  send(number.first, {{}, Message::Kind::mapped, members_.epoch, number.second, {}});
}

std::span<const std::byte> HostLoans::lent_by(std::uint32_t rank, std::uint64_t number) const {
  const auto found = theirs_.find({rank, number});
  if (found == theirs_.end() || found->second.segment == nullptr) return {};
  return found->second.segment->bytes();
}

}  // namespace moolink::runtime
