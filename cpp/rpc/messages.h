#pragma once

// The rpc layer's content of session messages. The encoded head is the message's body; a user's own
// body, if any, is its first part, and the user's parts follow, so that no byte is copied.

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/uid.h"
#include "session/outbox.h"
#include "wire/archive.h"
#include "wire/payload.h"

namespace moolink::rpc {

enum class MessageKind : std::uint8_t {
  call = 1,
  result = 2,
  cancel = 3,
  service = 4,
  stream = 5,
  credit = 6,
};

struct CallHead {
  std::uint64_t id = 0;
  std::string function;
  std::uint64_t credit = 0;  // of a stream: how many items may come; 0: an ordinary call

  auto fields() { return std::tie(id, function, credit); }
};

struct ResultHead {
  std::uint64_t id = 0;
  std::optional<Error> error;
  std::uint64_t items = 0;  // of a stream: how many were sent before; they may arrive later

  auto fields() { return std::tie(id, error, items); }
};

struct StreamHead {
  std::uint64_t id = 0;
  std::uint64_t number = 0;  // of the item, from 0

  auto fields() { return std::tie(id, number); }
};

struct CreditHead {
  std::uint64_t id = 0;
  std::uint64_t allowed = 0;  // items in all

  auto fields() { return std::tie(id, allowed); }
};

struct CancelHead {
  std::uint64_t id = 0;

  auto fields() { return std::tie(id); }
};

struct ServiceHead {
  std::uint8_t service = 0;

  auto fields() { return std::tie(service); }
};

struct Found {
  std::string name;
  Uid instance;
  Uid host_key;
  std::vector<std::string> addresses;

  auto fields() { return std::tie(name, instance, host_key, addresses); }
};

struct DirectoryMessage {
  std::optional<std::string>
      find;  // a peer of this name; every peer that is connected to it answers
  std::optional<Found> found;

  auto fields() { return std::tie(find, found); }
};

// Between holders of the token: in which groups are there peers of a name? The answer comes at
// once, and again whenever such a peer connects to the one that was asked.
struct NamesakesMessage {
  std::string name;
  bool asks = false;
  // The answer: the groups whose keys peers of the name hold; empty text: the token.
  std::vector<std::string> groups;

  auto fields() { return std::tie(name, asks, groups); }
};

template <class Head>
wire::Payload with_head(const Head& head, wire::Payload user) {
  wire::Payload message;
  message.body = wire::encode(head);
  message.parts.reserve(user.parts.size() + 1);
  message.parts.push_back(std::move(user.body));
  for (Buffer& part : user.parts) message.parts.push_back(std::move(part));
  message.lent = std::move(user.lent);
  for (wire::LentPart& lent : message.lent) ++lent.part;
  message.placed = std::move(user.placed);
  for (wire::PlacedPart& placed : message.placed) ++placed.part;
  return message;
}

template <class Head>
wire::Payload head_only(const Head& head) {
  return {wire::encode(head), {}};
}

inline session::OutgoingMessage message_of(MessageKind kind, wire::Payload payload) {
  return {.kind = static_cast<std::uint8_t>(kind), .payload = std::move(payload)};
}

// The user's payload of a message made by with_head. Throws Exception{wire} if it has none.
inline wire::Payload user_payload(wire::Payload message) {
  if (message.parts.empty()) wire::fail("a message without its body");
  if (message.find_lent(0) != nullptr) wire::fail("a message whose body is lent");
  wire::Payload user;
  const bool is_exposed = !message.exposed.empty() && message.exposed.front() == 0;
  user.body = is_exposed ? private_copy(message.parts.front()) : std::move(message.parts.front());
  message.parts.erase(message.parts.begin());
  user.parts = std::move(message.parts);
  user.lent = std::move(message.lent);
  user.from_guest = message.from_guest;
  for (wire::LentPart& lent : user.lent) --lent.part;
  return user;
}

}  // namespace moolink::rpc
