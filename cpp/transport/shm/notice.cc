#include "transport/shm/notice.h"

#include <string>

#include "base/barrier.h"
#include "base/error.h"
#include "wire/archive.h"

namespace moolink::transport::shm {
namespace {

bool has_its_descriptors(NoticeKind kind, std::size_t count) {
  switch (kind) {
    case NoticeKind::greeting:
      return count == 2;
    case NoticeKind::pass:
      return count == 1;
    case NoticeKind::share:
      return count > 0;
    case NoticeKind::retire:
    case NoticeKind::mapped:
    case NoticeKind::bye:
    case NoticeKind::receives:
    case NoticeKind::refuses:
      return count == 0;
  }
  return false;
}

}  // namespace

bool send_notice(int socket, const Notice& notice, std::span<const int> descriptors) {
  return io::send_message(socket, wire::encode(notice).span(), descriptors);
}

bool try_send_notice(int socket, const Notice& notice, std::span<const int> descriptors) {
  bool sent = false;
  guard([&] { sent = send_notice(socket, notice, descriptors); }, [](const Error&) {});
  return sent;
}

Notice decode_notice(const io::DescriptorMessage& message) {
  const auto notice = wire::decode<Notice>(std::span<const std::byte>(message.bytes));
  if (notice.magic != kNoticeMagic) {
    throw Exception(ErrorCode::wire, "the other end of the socket is no moolink peer");
  }
  if (notice.version != kNoticeVersion) {
    throw Exception(ErrorCode::wire, "the peer speaks version " + std::to_string(notice.version) +
                                         " of the shared-memory transport, this one " +
                                         std::to_string(kNoticeVersion) +
                                         "; install the same moolink on both");
  }
  if (!has_its_descriptors(notice.kind, message.descriptors.size())) {
    throw Exception(ErrorCode::wire, "a notice came with " +
                                         std::to_string(message.descriptors.size()) +
                                         " descriptors, which is not the number of its kind");
  }
  return notice;
}

}  // namespace moolink::transport::shm
