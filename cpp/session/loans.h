#pragma once

// Parts that stay in place: the receiver maps the lender's memory, and returns the loan when no
// reference to it is left. docs/design/protocol/session.md, "Loans".

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>

#include "base/buffer.h"
#include "session/actions.h"
#include "session/outbox.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::session {

// Loans that this side has given and that are not returned: their memory is kept beyond the
// acknowledgement of their messages. Owned by the Session; the Sender asks it which parts of a
// message travel as loans, and the Session passes it the peer's returns. clear() ends them all with
// the session.
class LoansGiven {
 public:
  explicit LoansGiven(ActionSink& sink) : sink_(sink) {}

  // Lets the peer map the segments of the parts that this path can lend, once an attempt. True: the
  // message is written once the answer has arrived.
  bool ask(ConnectionId connection, const wire::PathTraits& traits, std::uint64_t seq,
           Outgoing& outgoing);
  // Whether the part travels as a loan in this attempt; if it has a loan, `part` names it.
  bool lend(const wire::PathTraits& traits, Outgoing& outgoing, std::size_t which,
            wire::PartHead& part);
  // The body of a message of kReturnKind. Throws Exception{wire} if one was not given.
  void returned(const Buffer& body);

  std::size_t size() const { return loans_.size(); }
  void clear();

 private:
  struct Loan {
    Buffer bytes;
    std::shared_ptr<std::atomic<bool>> out;  // LentPart::out
  };

  ActionSink& sink_;
  std::map<std::uint64_t, Loan> loans_;
  std::uint64_t last_ = 0;  // of this session
};

// Loans given to this side, and their returns. Owned by the Session, which sends the returns as
// messages; the Inbox notes the loans of messages, and ends those whose parts came as bytes.
// clear() forgets them with the session: its loans are back already.
class LoansHeld {
 public:
  // Throws Exception{wire} if it was given before.
  void add(std::uint64_t loan);
  // No reference to it is left here. Ignores one that has ended before.
  void end(std::uint64_t loan);

  bool has_returns() const { return !due_.empty(); }
  // The next of them, as many as one message takes; sent() once it was sent.
  OutgoingMessage next_returns() const;
  void sent();

  std::size_t size() const { return loans_.size(); }
  void clear();

 private:
  std::size_t count() const;

  std::set<std::uint64_t> loans_;  // not ended
  std::deque<std::uint64_t> due_;  // ended, not sent yet
};

}  // namespace moolink::session
