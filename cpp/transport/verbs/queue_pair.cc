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

constexpr std::uint32_t kWantedInline = 256;
// 4 µs * 2^14 = 67 ms without an answer, seven times: half a second, then the connection ends. On
// hardware it may be up to four times that.
constexpr std::uint8_t kTimeout = 14;
constexpr std::uint8_t kRetries = 6;      // 7 means for ever on some devices
constexpr std::uint8_t kSlotRetries = 7;  // for ever: a peer that does not poll is slow, not gone
constexpr std::uint8_t kSlotPause = 12;   // 0.64 ms, before a SEND without a slot is retried
constexpr std::uint8_t kHops = 64;
constexpr std::uint32_t kPacketNumbers = 0xffffff;

[[noreturn]] void fail(const std::string& what, int error) {
  throw Exception(ErrorCode::error, what + ": " + std::strerror(error));
}

}  // namespace

QueuePair::QueuePair(const Device& device, ibv_cq* completions)
    : device_(device),
      library_(device.library()),
      first_packet_(static_cast<std::uint32_t>(entropy64()) & kPacketNumbers) {
  try {
    make_pair(completions);
    initialise();
  } catch (const Exception&) {
    destroy();
    throw;
  }
}

void QueuePair::make_pair(ibv_cq* completions) {
  auto attributes = zeroed<ibv_qp_init_attr>();
  attributes.send_cq = attributes.recv_cq = completions;
  attributes.srq = device_.receive_queue();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = kRequests;
  attributes.cap.max_send_sge = 1;
  attributes.cap.max_inline_data = kWantedInline;
  pair_ = library_.create_qp(device_.domain(), &attributes);
  if (pair_ == nullptr) {  // perhaps it copies nothing into requests
    attributes.cap.max_inline_data = 0;
    pair_ = library_.create_qp(device_.domain(), &attributes);
  }
  if (pair_ == nullptr) fail("no queue pair can be made", errno);
  inline_bytes_ = attributes.cap.max_inline_data;
}

void QueuePair::initialise() {
  auto attributes = zeroed<ibv_qp_attr>();
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device_.port().number;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  const int error = library_.modify_qp(
      pair_, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0) fail("a queue pair cannot be initialised", error);
}

void QueuePair::connect(const Endpoint& there, const Endpoint::Pair& pair) {
  const Port& port = device_.port();
  auto ready = zeroed<ibv_qp_attr>();
  ready.qp_state = IBV_QPS_RTR;
  ready.path_mtu = static_cast<ibv_mtu>(std::min<int>(there.mtu, port.mtu));
  ready.dest_qp_num = pair.number;
  ready.rq_psn = pair.first_packet & kPacketNumbers;
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
                              std::uint32_t immediate, bool tell) {
  auto where = zeroed<ibv_sge>();
  where.addr = reinterpret_cast<std::uintptr_t>(bytes.data());
  where.length = static_cast<std::uint32_t>(bytes.size());
  where.lkey = key.value_or(0);
  auto request = zeroed<ibv_send_wr>();
  request.sg_list = &where;
  request.num_sge = bytes.empty() ? 0 : 1;
  request.opcode = IBV_WR_SEND_WITH_IMM;
  request.imm_data = htonl(immediate);
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
  request.wr_id = (posted_ + 1) | kRequest;
  ibv_send_wr* bad = nullptr;
  const int error = library_.post_send(pair_, &request, &bad);
  if (error != 0) fail("the device refuses a request", error);
  return ++posted_;
}

void QueuePair::ended(std::uint64_t request) { ended_ = std::max(ended_, request); }

void QueuePair::stop() {
  if (pair_ == nullptr || std::exchange(stopped_, true)) return;
  auto attributes = zeroed<ibv_qp_attr>();
  attributes.qp_state = IBV_QPS_ERR;
  library_.modify_qp(pair_, &attributes, IBV_QP_STATE);
}

void QueuePair::destroy() {
  if (pair_ != nullptr) library_.destroy_qp(std::exchange(pair_, nullptr));
  ended_ = posted_;
}

}  // namespace moolink::transport::verbs
