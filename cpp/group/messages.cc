#include "group/messages.h"

#include <string>

#include "base/error.h"

namespace moolink::group {
namespace {

// A view of a hundred thousand members. The broker keeps each member's last announcement.
constexpr std::size_t kMostBytes = std::size_t{16} << 20;

}  // namespace

Recipient recipient_of(std::span<const std::byte> bytes) {
  static_assert(std::is_same_v<std::variant_alternative_t<3, decltype(Message::body)>, NewEpoch>,
                "the messages to the broker come first");
  if (bytes.size() > kMostBytes) {
    throw Exception(ErrorCode::wire, "a group's message has " + std::to_string(bytes.size()) +
                                         " bytes, more than any group needs");
  }
  wire::Reader reader(bytes);
  Recipient recipient;
  reader(recipient.group);
  recipient.broker = reader.varint() < 3;
  return recipient;
}

}  // namespace moolink::group
