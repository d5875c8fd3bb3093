// Parts that stay in place: the receiver maps the lender's memory, and returns the loan when no
// reference to it is left. See docs/design/protocol/session.md, "Loans".

#include <algorithm>
#include <set>
#include <utility>

#include "base/mutant.h"
#include "session/session.h"

namespace moolink::session {

namespace {

constexpr std::size_t kReturnsInMessage = 1024;

}  // namespace

// ---- the lender ----

// Small parts travel in the frame, which costs less than returning a loan. A message first written
// without loans never gets any: the peer may have it complete, and then ignores later attempts.
bool Session::may_lend(const Link& link, Outgoing& outgoing, std::size_t which) {
  const wire::LentPart& lent = outgoing.message.payload.lent[which];
  if (!link.traits.loans || lent.segment == 0) return false;
  const bool too_late = outgoing.written && outgoing.loans[which] == 0;
  if (too_late && !mutant("lend_in_a_later_attempt")) return false;
  return outgoing.find_large(lent.part) != nullptr;
}

// True: the message is written once the answer arrives.
bool Session::asks_to_lend(const Link& link, std::uint64_t seq, Outgoing& outgoing) {
  if (outgoing.lending != Outgoing::Lending::unasked) return false;
  PassSegments pass{link.connection, seq, {}};
  const std::vector<wire::LentPart>& lent = outgoing.message.payload.lent;
  std::set<std::uint64_t> known;
  for (std::size_t i = 0; i < lent.size(); ++i) {
    if (!may_lend(link, outgoing, i)) continue;
    if (known.insert(lent[i].segment).second) pass.segments.push_back(lent[i].segment);
  }
  if (pass.segments.empty()) return false;
  outgoing.lending = Outgoing::Lending::asked;
  outgoing.connection = link.connection;
  actions_.push_back(std::move(pass));
  return true;
}

void Session::segments_passed(Time now, ConnectionId connection, std::uint64_t seq, bool passed) {
  Link* link = find(connection);
  Outgoing* outgoing = outbox_.find(seq);
  if (link == nullptr || outgoing == nullptr || outgoing->connection != connection ||
      outgoing->lending != Outgoing::Lending::asked) {
    return;  // the connection was lost meanwhile
  }
  outgoing->lending = passed ? Outgoing::Lending::possible : Outgoing::Lending::impossible;
  write_message(now, *link, seq);
}

// Whether the part travels as a loan in this attempt. Its loan, once given, is named in every
// attempt: the peer may have completed the one in which it was mapped, or one with bytes.
bool Session::lend(const Link& link, Outgoing& outgoing, std::size_t which, wire::PartHead& part) {
  const bool possible =
      outgoing.lending == Outgoing::Lending::possible && may_lend(link, outgoing, which);
  std::uint64_t& loan = outgoing.loans[which];
  if (possible && (loan == 0 || mutant("new_loan_each_attempt"))) {
    loan = ++last_loan_;
    const wire::LentPart& lent = outgoing.message.payload.lent[which];
    if (lent.out != nullptr) *lent.out = true;
    const Buffer& bytes = outgoing.bytes_of(lent.part);
    lent_.emplace(loan,
                  Loan{mutant("loan_ends_with_acknowledgement") ? Buffer{} : bytes, lent.out});
  }
  part.id = loan;
  return possible;
}

void Session::loans_returned(const Buffer& body) {
  for (const std::uint64_t loan : wire::decode<wire::Return>(body).loans) {
    const auto found = lent_.find(loan);
    if (found == lent_.end()) wire::fail("a loan was returned that was not given");
    if (found->second.out != nullptr) *found->second.out = false;
    lent_.erase(found);
  }
}

// ---- the borrower ----

void Session::map_loans(const Link& link) {
  for (const Inbox::ToMap& part : inbox_.take_to_map()) {
    if (!link.traits.loans) wire::fail("a loan on a path that has none");
    actions_.push_back(MapLoan{link.connection, id_, part.seq, part.part, part.place});
  }
}

void Session::return_loans(Time now, std::uint64_t session, std::span<const std::uint64_t> loans) {
  // Loans of a lost session have been returned already.
  if (session != id_) return;
  give_back(now, loans);
}

void Session::give_back(Time now, std::span<const std::uint64_t> loans) {
  for (const std::uint64_t loan : loans) {
    if (inbox_.end_loan(loan)) returns_due_.push_back(loan);
  }
  write_returns(now);
}

// As far as the window allows; the rest follows when it opens.
void Session::write_returns(Time now) {
  while (!returns_due_.empty() && ready_) {
    const std::size_t count = std::min(returns_due_.size(), kReturnsInMessage);
    const auto rest = returns_due_.begin() + static_cast<std::ptrdiff_t>(count);
    OutgoingMessage message;
    message.kind = kReturnKind;
    message.payload.body = wire::encode(wire::Return{{returns_due_.begin(), rest}});
    if (!outbox_.has_room(message.payload.body.size(), 0, false)) {
      if (mutant("forget_returns_when_full")) returns_due_.clear();
      return;
    }
    returns_due_.erase(returns_due_.begin(), rest);
    const std::uint64_t seq = outbox_.push(std::move(message));
    if (Link* link = best_link(now)) write_message(now, *link, seq);
  }
}

}  // namespace moolink::session
