#include "transport/verbs/queue_pairs.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/system_error.h"

namespace moolink::transport::verbs {
namespace {

// Every request may end, and a peer may fill every slot, before the queue is polled.
constexpr std::size_t kCompletions = 1024;  // beside the requests of all but the first

}  // namespace

QueuePairs::QueuePairs(std::shared_ptr<Device> device, std::size_t count, void* owner)
    : device_(std::move(device)), library_(device_->library()) {
  const std::size_t entries = kCompletions + (count - 1) * QueuePair::kRequests;
  completions_ = library_.create_cq(device_->context(), static_cast<int>(entries), owner,
                                    device_->channel(), 0);
  if (completions_ == nullptr) throw_system_error("no queue of completions can be made");
  try {
    while (pairs_.size() < count) {
      pairs_.push_back(std::make_unique<QueuePair>(*device_, completions_));
    }
  } catch (...) {
    destroy();
    throw;
  }
}

Endpoint QueuePairs::endpoint() const {
  const Port& port = device_->port();
  Endpoint endpoint;
  endpoint.infiniband = port.infiniband;
  endpoint.lid = port.lid;
  std::memcpy(endpoint.gid.data(), port.gid.raw, endpoint.gid.size());
  endpoint.mtu = static_cast<std::uint8_t>(port.mtu);
  for (const auto& pair : pairs_) endpoint.pairs.push_back(pair->end());
  return endpoint;
}

void QueuePairs::connect(const Endpoint& there) {
  const Port& port = device_->port();
  if (there.infiniband != port.infiniband) {
    throw Exception(ErrorCode::error, std::string("this side is on ") +
                                          (port.infiniband ? "InfiniBand" : "Ethernet") +
                                          ", the other one is not");
  }
  if (there.mtu < IBV_MTU_256 || there.mtu > IBV_MTU_4096) {
    throw Exception(ErrorCode::wire, "the other end of a queue pair names no packet size");
  }
  if (there.pairs.empty() || there.pairs.size() > std::size_t{kMost}) {
    throw Exception(ErrorCode::wire, "the other end has " + std::to_string(there.pairs.size()) +
                                         " queue pairs; it must have 1 to " +
                                         std::to_string(kMost));
  }
  pairs_.resize(std::min(pairs_.size(), there.pairs.size()));
  for (std::size_t i = 0; i < pairs_.size(); ++i) pairs_[i]->connect(there, there.pairs[i]);
}

bool QueuePairs::idle() const {
  return std::all_of(pairs_.begin(), pairs_.end(), [](const auto& pair) { return pair->idle(); });
}

bool QueuePairs::include(const ibv_qp* pair) const {
  return std::any_of(pairs_.begin(), pairs_.end(),
                     [&](const auto& ours) { return ours->handle() == pair; });
}

// --- completions

bool QueuePairs::fetch() {
  if (fetched_at_ < fetched_end_) return true;
  fetched_at_ = fetched_end_ = 0;
  if (completions_ == nullptr) return false;
  const int count = library_.poll_cq(completions_, kFetched, fetched_.data());
  if (count < 0) throw Exception(ErrorCode::error, "the device does not tell what has ended");
  fetched_end_ = count;
  return count > 0;
}

std::optional<Completion> QueuePairs::poll() {
  if (!fetch()) return std::nullopt;
  const ibv_wc& from = fetched_[static_cast<std::size_t>(fetched_at_++)];
  Completion completion;
  completion.pair = index_of(from.qp_num);
  completion.received = (from.wr_id & QueuePair::kRequest) == 0;
  completion.id = from.wr_id & ~QueuePair::kRequest;
  if (from.status != IBV_WC_SUCCESS) completion.error = library_.wc_status_str(from.status);
  if (completion.received) {
    completion.bytes = from.byte_len;
    completion.immediate = ntohl(from.imm_data);
  } else {
    pairs_[completion.pair]->ended(completion.id);
  }
  return completion;
}

std::size_t QueuePairs::index_of(std::uint32_t number) const {
  const auto found = std::find_if(pairs_.begin(), pairs_.end(),
                                  [&](const auto& pair) { return pair->number() == number; });
  if (found == pairs_.end()) {
    throw Exception(ErrorCode::error, "the device reports an unknown queue pair");
  }
  return static_cast<std::size_t>(found - pairs_.begin());
}

bool QueuePairs::arm() {
  if (completions_ == nullptr) return true;
  if (!armed_) {
    if (library_.req_notify_cq(completions_, 0) != 0) return true;
    armed_ = true;
  }
  return !fetch();
}

// --- the end

void QueuePairs::stop() {
  for (const auto& pair : pairs_) pair->stop();
}

void QueuePairs::destroy() {
  if (completions_ == nullptr) return;
  stop();
  try {
    // Slots that were filled and not read are for other connections.
    while (const auto completion = poll()) {
      if (completion->received) device_->post_slot(completion->id);
    }
  } catch (const Exception&) {
    device_->set_failed();
  }
  for (const auto& pair : pairs_) pair->destroy();
  library_.destroy_cq(std::exchange(completions_, nullptr));
  fetched_at_ = fetched_end_ = 0;
}

}  // namespace moolink::transport::verbs
