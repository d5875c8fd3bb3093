#include "transport/verbs/queue_pair.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/uid.h"

namespace moolink::transport::verbs {
namespace {

// Of a request that is a receive, beside the number of its slot, and of one that is none. Slots are
// posted with their bare numbers; requests of this side carry this bit.
constexpr std::uint64_t kOurs = std::uint64_t{1} << 63;

constexpr std::uint32_t kWantedInline = 256;
// 4 µs * 2^14 = 67 ms without an answer, seven times: half a second, then the connection ends. On
// hardware it may be up to four times that.
constexpr std::uint8_t kTimeout = 14;
constexpr std::uint8_t kRetries = 6;      // 7 means for ever on some devices
constexpr std::uint8_t kSlotRetries = 7;  // for ever: who does not poll is slow, not gone
constexpr std::uint8_t kSlotPause = 12;   // 0.64 ms, before a SEND that found no slot comes again
constexpr std::uint8_t kHops = 64;
constexpr std::uint32_t kPacketNumbers = 0xffffff;

[[noreturn]] void fail(const std::string& what, int error) {
  throw Exception(ErrorCode::error, what + ": " + std::strerror(error));
}

}  // namespace

QueuePair::QueuePair(std::shared_ptr<Device> device, void* owner)
    : device_(std::move(device)),
      library_(device_->library()),
      first_packet_(static_cast<std::uint32_t>(entropy64()) & kPacketNumbers) {
  // Every request may end, and every slot may be filled, before anybody looks.
  constexpr int kEntries = 1024;
  completions_ = library_.create_cq(device_->context(), kEntries, owner, device_->channel(), 0);
  if (completions_ == nullptr) fail("no queue of completions can be made", errno);
  try {
    make_pair();
    initialise();
  } catch (const Exception&) {
    destroy();
    throw;
  }
}

void QueuePair::make_pair() {
  auto attributes = zeroed<ibv_qp_init_attr>();
  attributes.send_cq = attributes.recv_cq = completions_;
  attributes.srq = device_->receive_queue();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = kRequests;
  attributes.cap.max_send_sge = 1;
  attributes.cap.max_inline_data = kWantedInline;
  pair_ = library_.create_qp(device_->domain(), &attributes);
  if (pair_ == nullptr) {  // perhaps it copies nothing into requests
    attributes.cap.max_inline_data = 0;
    pair_ = library_.create_qp(device_->domain(), &attributes);
  }
  if (pair_ == nullptr) fail("no queue pair can be made", errno);
  inline_bytes_ = attributes.cap.max_inline_data;
}

void QueuePair::initialise() {
  auto attributes = zeroed<ibv_qp_attr>();
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device_->port().number;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  const int error = library_.modify_qp(
      pair_, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0) fail("a queue pair cannot be initialised", error);
}

Endpoint QueuePair::endpoint() const {
  const Port& port = device_->port();
  Endpoint endpoint;
  endpoint.infiniband = port.infiniband;
  endpoint.lid = port.lid;
  std::memcpy(endpoint.gid.data(), port.gid.raw, endpoint.gid.size());
  endpoint.queue_pair = pair_->qp_num;
  endpoint.first_packet = first_packet_;
  endpoint.mtu = static_cast<std::uint8_t>(port.mtu);
  return endpoint;
}

void QueuePair::connect(const Endpoint& there) {
  const Port& port = device_->port();
  if (there.infiniband != port.infiniband) {
    throw Exception(ErrorCode::error, std::string("this side is on ") +
                                          (port.infiniband ? "InfiniBand" : "Ethernet") +
                                          ", the other one is not");
  }
  if (there.mtu < IBV_MTU_256 || there.mtu > IBV_MTU_4096) {
    throw Exception(ErrorCode::wire, "the other end of a queue pair names no packet size");
  }
  auto ready = zeroed<ibv_qp_attr>();
  ready.qp_state = IBV_QPS_RTR;
  ready.path_mtu = static_cast<ibv_mtu>(std::min<int>(there.mtu, port.mtu));
  ready.dest_qp_num = there.queue_pair;
  ready.rq_psn = there.first_packet & kPacketNumbers;
  ready.max_dest_rd_atomic = 1;
  ready.min_rnr_timer = kSlotPause;
  ready.ah_attr.port_num = port.number;
  ready.ah_attr.dlid = there.lid;
  if (!port.infiniband) {
    ready.ah_attr.is_global = 1;
    std::memcpy(ready.ah_attr.grh.dgid.raw, there.gid.data(), there.gid.size());
    ready.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(port.gid_index);
    ready.ah_attr.grh.hop_limit = kHops;
  }
  int error =
      library_.modify_qp(pair_, &ready,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                             IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error != 0) fail("the other end cannot be reached by RDMA", error);
  auto sending = zeroed<ibv_qp_attr>();
  sending.qp_state = IBV_QPS_RTS;
  sending.timeout = kTimeout;
  sending.retry_cnt = kRetries;
  sending.rnr_retry = kSlotRetries;
  sending.sq_psn = first_packet_;
  sending.max_rd_atomic = 1;
  error = library_.modify_qp(pair_, &sending,
                             IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                 IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  if (error != 0) fail("a queue pair cannot send", error);
}

std::uint64_t QueuePair::send(std::span<const std::byte> bytes, std::optional<std::uint32_t> key,
                              std::uint32_t taken, bool tell) {
  auto where = zeroed<ibv_sge>();
  where.addr = reinterpret_cast<std::uintptr_t>(bytes.data());
  where.length = static_cast<std::uint32_t>(bytes.size());
  where.lkey = key.value_or(0);
  auto request = zeroed<ibv_send_wr>();
  request.sg_list = &where;
  request.num_sge = bytes.empty() ? 0 : 1;
  request.opcode = IBV_WR_SEND_WITH_IMM;
  request.imm_data = htonl(taken);
  if (tell) request.send_flags |= IBV_SEND_SIGNALED;
  if (!key && !bytes.empty()) request.send_flags |= IBV_SEND_INLINE;
  return post(request);
}

std::uint64_t QueuePair::write(std::span<const std::byte> bytes, std::uint32_t key,
                               std::uint64_t address, std::uint32_t remote_key) {
  auto where = zeroed<ibv_sge>();
  where.addr = reinterpret_cast<std::uintptr_t>(bytes.data());
  where.length = static_cast<std::uint32_t>(bytes.size());
  where.lkey = key;
  auto request = zeroed<ibv_send_wr>();
  request.sg_list = &where;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.rdma.remote_addr = address;
  request.wr.rdma.rkey = remote_key;
  return post(request);
}

std::uint64_t QueuePair::post(ibv_send_wr& request) {
  request.wr_id = (posted_ + 1) | kOurs;
  ibv_send_wr* bad = nullptr;
  const int error = library_.post_send(pair_, &request, &bad);
  if (error != 0) fail("the device refuses a request", error);
  return ++posted_;
}

bool QueuePair::fetch() {
  if (fetched_at_ < fetched_end_) return true;
  fetched_at_ = fetched_end_ = 0;
  if (completions_ == nullptr) return false;
  const int count = library_.poll_cq(completions_, kFetched, fetched_.data());
  if (count < 0) throw Exception(ErrorCode::error, "the device does not tell what has ended");
  fetched_end_ = count;
  return count > 0;
}

std::optional<Completion> QueuePair::poll() {
  if (!fetch()) return std::nullopt;
  const ibv_wc& from = fetched_[static_cast<std::size_t>(fetched_at_++)];
  Completion completion;
  completion.received = (from.wr_id & kOurs) == 0;
  completion.id = from.wr_id & ~kOurs;
  if (from.status != IBV_WC_SUCCESS) completion.error = library_.wc_status_str(from.status);
  if (completion.received) {
    completion.bytes = from.byte_len;
    completion.taken = ntohl(from.imm_data);
  } else {
    ended_ = std::max(ended_, completion.id);
  }
  return completion;
}

bool QueuePair::arm() {
  if (completions_ == nullptr) return true;
  if (!armed_) {
    if (library_.req_notify_cq(completions_, 0) != 0) return true;
    armed_ = true;
  }
  return !fetch();
}

void QueuePair::stop() {
  if (pair_ == nullptr || std::exchange(stopped_, true)) return;
  auto attributes = zeroed<ibv_qp_attr>();
  attributes.qp_state = IBV_QPS_ERR;
  library_.modify_qp(pair_, &attributes, IBV_QP_STATE);
}

void QueuePair::destroy() {
  stop();
  try {
    // Slots that were filled and not looked at are for other connections.
    while (const auto completion = poll()) {
      if (completion->received) device_->post_slot(completion->id);
    }
  } catch (const Exception&) {
    device_->set_failed();
  }
  if (pair_ != nullptr) library_.destroy_qp(std::exchange(pair_, nullptr));
  if (completions_ != nullptr) library_.destroy_cq(std::exchange(completions_, nullptr));
  fetched_at_ = fetched_end_ = 0;
  ended_ = posted_;
}

}  // namespace moolink::transport::verbs
