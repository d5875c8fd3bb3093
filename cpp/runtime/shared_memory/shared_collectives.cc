#include "runtime/shared_memory/shared_collectives.h"

#include <algorithm>
#include <utility>

#include "base/barrier.h"

namespace moolink::runtime {
namespace {

// Below this, windows are faster than waiting until all ranks have read.
constexpr std::uint64_t kLeastLentBytes = std::uint64_t{1} << 20;
// After that, other threads may have the engine's lock; the work continues in the next turn.
constexpr Duration kStint = microseconds(200);

bool may_be_lent(const collective::PipelineOperation& operation) {
  return !operation.abandoned && operation.passage.kind == collective::Kind::all_reduce &&
         operation.inputs.size() == 1 && operation.output.size() >= kLeastLentBytes;
}

}  // namespace

SharedCollectives::SharedCollectives(std::shared_ptr<RpcPeer> rpc, std::string group,
                                     std::string scope, std::string what, rpc::Service service,
                                     Events events)
    : rpc_(std::move(rpc)),
      events_(std::move(events)),
      segment_(rpc_, std::move(group), std::move(scope),
               {std::move(what), service, [this] { attach(); },
                [this] { events_.ready(segment_.members().epoch); }}) {
  observes_ = rpc_->add(static_cast<PeerObserver&>(*this));
  rpc_->context()->engine().loop().add(*this);
}

void SharedCollectives::attach() {
  pipeline_ = std::make_unique<collective::SharedPipeline>(
      collective::PipelineSegment(segment_.segment(), segment_.segment()->bytes(),
                                  segment_.layout()),
      segment_.rank(), rpc_->context()->pool(),
      [this](std::uint32_t rank, std::uint64_t number) { return lent_by(rank, number); });
}

void SharedCollectives::leave() {
  if (pipeline_) pipeline_->give_up();
  pipeline_.reset();
  outdated_ = false;
  ended_.clear();
  segment_.leave();
}

void SharedCollectives::close() {
  if (std::exchange(closed_, true)) return;
  if (pipeline_) pipeline_->withdraw();
  pipeline_.reset();
  ended_.clear();
  segment_.close();
  observes_.reset();
  rpc_->context()->engine().loop().remove(*this);
}

void SharedCollectives::start(collective::PipelineOperation operation) {
  if (outdated_) return;
  if (!pipeline_) throw Exception(ErrorCode::error, "this member has no shared memory for it");
  if (may_be_lent(operation)) {
    operation.lent = place(operation.inputs.front().data(), operation.output.size());
  }
  pipeline_->start(std::move(operation));
  rpc_->context()->engine().loop().wake();
}

// Returns the place where the other members of the host read these bytes. Empty: they are not in
// the lending pool, or a member has not mapped the segment, which this call then passes.
collective::LentPlace SharedCollectives::place(const std::byte* data, std::size_t size) const {
  const auto place = rpc_->context()->lending().find(data, size);
  if (!place) return {};
  const Members& members = segment_.members();
  bool mapped = members.instances.size() > 1;
  for (std::uint32_t rank = 0; rank < members.instances.size(); ++rank) {
    if (rank == segment_.rank()) continue;
    mapped &= rpc_->lends(members.instances[rank], members.names[rank], place->segment,
                          segment_.group_name());
  }
  return mapped ? collective::LentPlace{place->segment, place->offset} : collective::LentPlace{};
}

LentBytes SharedCollectives::lent_by(std::uint32_t rank, std::uint64_t segment) const {
  const Uid& lender = segment_.members().instances[rank];
  LentBytes bytes = rpc_->lent_by(lender, segment);
  for (auto ended = ended_.begin(); bytes == nullptr && ended != ended_.end(); ++ended) {
    if (ended->first == lender) bytes = ended->second->lent_bytes(segment);
  }
  return bytes;
}

void SharedCollectives::connection_ended(const Uid& instance,
                                         const std::shared_ptr<transport::Connection>& connection) {
  const std::vector<Uid>& members = segment_.members().instances;
  const bool is_member = std::ranges::find(members, instance) != members.end();
  if (is_member && connection->path() == wire::PathKind::shm) {
    ended_.emplace_back(instance, connection);
  }
}

void SharedCollectives::publish(std::uint64_t s, std::uint32_t chunk, Buffer result) {
  if (!pipeline_) return;
  pipeline_->publish(s, chunk, std::move(result));
  rpc_->context()->engine().loop().wake();
}

void SharedCollectives::abandon(std::uint64_t s) {
  if (!pipeline_) return;
  pipeline_->abandon(s);
  rpc_->context()->engine().loop().wake();
}

std::vector<std::string> SharedCollectives::waiting_for() const {
  std::vector<std::string> names;
  if (!pipeline_) return names;
  for (const std::uint32_t rank : pipeline_->waiting_for()) {
    names.push_back(segment_.members().names[rank]);
  }
  return names;
}

bool SharedCollectives::poll() {
  if (!pipeline_ || (pipeline_->idle() && !pipeline_->must_look())) return false;
  const auto keep = shared_from_this();
  bool worked = true;
  const auto go_on = [&] {
    worked = advance();
    if (worked) take_sums();
    if (worked) take_ended();
  };
  guard(go_on, [this](const Error& error) { events_.broken(error); });
  return worked;
}

// As much as possible now, for a limited time. Rings at once the ranks that sleep for its stores.
bool SharedCollectives::advance() {
  bool worked = false;
  const Time until = io::now() + kStint;
  while (pipeline_->step()) {
    worked = true;
    for (const std::uint32_t rank : pipeline_->take_wakeups()) segment_.ring(rank);
    if (!pipeline_->must_look() && io::now() >= until) break;
  }
  return worked;
}

void SharedCollectives::take_sums() {
  for (collective::SharedPipeline::Sum& sum : pipeline_->take_sums()) {
    events_.summed(std::move(sum));
    if (!pipeline_) return;  // summed() has moved this member to another epoch
  }
}

void SharedCollectives::take_ended() {
  if (!pipeline_) return;
  const std::vector<collective::SharedPipeline::Ended> all = pipeline_->take_ended();
  if (all.empty()) return;
  if (pipeline_->given_up()) {
    leave();
    outdated_ = true;
    return;
  }
  for (const collective::SharedPipeline::Ended& ended : all) {
    if (!ended.abandoned) events_.ended(ended.s);
    if (!pipeline_) return;  // ended() has moved this member to another epoch
  }
}

bool SharedCollectives::prepare_sleep() {
  if (!pipeline_) return true;
  const bool waits = pipeline_->announce_sleep();
  if (pipeline_->may_sleep()) return true;
  if (waits) pipeline_->awake();
  return false;
}

}  // namespace moolink::runtime
