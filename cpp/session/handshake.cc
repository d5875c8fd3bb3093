#include "session/handshake.h"

#include <utility>

namespace moolink::session {

namespace {

// WELCOME: the sender has taken part in the session that it names.
constexpr std::uint8_t kEstablished = 1;

}  // namespace

void Handshake::begin() {
  if (chooses_ && id_ == 0) id_ = ++last_id_;
}

Handshake::Step Handshake::hear(std::uint64_t named, bool established,
                                std::optional<std::uint64_t> said) {
  return chooses_ ? hear_as_chooser(named, said) : hear_as_follower(named, established, said);
}

Handshake::Step Handshake::hear_as_chooser(std::uint64_t named, std::optional<std::uint64_t> said) {
  if (id_ != 0 && named == id_) return {.answer = said != id_, .attach = true};
  // Only the answer to our naming of the session, on this very connection, proves that the peer
  // does not have it: an earlier frame may have crossed the greeting of another connection.
  const bool proven = said == id_;
  if (id_ == 0 || proven) return {.enter = ++last_id_, .answer = true};
  return {.answer = true};
}

Handshake::Step Handshake::hear_as_follower(std::uint64_t named, bool established,
                                            std::optional<std::uint64_t> said) {
  if (named == 0) wire::fail("the choosing side named no session");
  // Sent before the session that we know, on a slower connection.
  if (named < newest_) return {.outdated = true};
  if (named == id_) return {.answer = said != id_, .attach = true};
  // A session that the peer knows us in and we do not, or that we had and lost: it is never entered
  // again at its beginning.
  const bool forgotten = established || named == newest_;
  newest_ = named;
  if (forgotten) return {.enter = 0, .answer = true};
  return {.enter = named, .answer = said != named, .attach = true};
}

wire::Frame Handshake::welcome(wire::Hello greeting, const SequenceSet& complete) const {
  greeting.session = id_;
  greeting.rx_next = complete.cum() + 1;
  greeting.rx_have = complete.bitmap();
  if (greeting.rx_have.size() > wire::kMaxHaveWords) greeting.rx_have.resize(wire::kMaxHaveWords);
  wire::Frame frame = wire::make_frame(wire::FrameType::welcome, greeting);
  frame.header.flags = agreed_ ? kEstablished : 0;
  return frame;
}

bool Handshake::is_established(const wire::ReceivedFrame& welcome) {
  return (welcome.header.flags & kEstablished) != 0;
}

}  // namespace moolink::session
