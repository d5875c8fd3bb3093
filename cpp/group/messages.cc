#include "group/messages.h"

namespace moolink::group {

Recipient recipient_of(std::span<const std::byte> bytes) {
  static_assert(std::is_same_v<std::variant_alternative_t<3, decltype(Message::body)>, NewEpoch>,
                "the messages to the broker come first");
  wire::Reader reader(bytes);
  Recipient recipient;
  reader(recipient.group);
  recipient.broker = reader.varint() < 3;
  return recipient;
}

}  // namespace moolink::group
