#include "session/loans.h"

#include <algorithm>
#include <utility>

namespace moolink::session {

namespace {

constexpr std::size_t kReturnsInMessage = 1024;

// Small parts travel in the frame, which costs less than returning a loan. A message first written
// without loans never gets any: the peer may have it complete, and then ignores later attempts.
bool may_lend(const wire::PathTraits& traits, Outgoing& outgoing, std::size_t which) {
  const wire::LentPart& lent = outgoing.message.payload.lent[which];
  if (!traits.loans || lent.segment == 0) return false;
  if (outgoing.written && outgoing.loans[which] == 0) return false;
  return outgoing.find_large(lent.part) != nullptr;
}

}  // namespace

bool LoansGiven::ask(ConnectionId connection, const wire::PathTraits& traits, std::uint64_t seq,
                     Outgoing& outgoing) {
  if (outgoing.lending != Outgoing::Lending::unasked) return false;
  PassSegments pass{connection, seq, {}};
  const std::vector<wire::LentPart>& lent = outgoing.message.payload.lent;
  std::set<std::uint64_t> known;
  for (std::size_t i = 0; i < lent.size(); ++i) {
    if (!may_lend(traits, outgoing, i)) continue;
    if (known.insert(lent[i].segment).second) pass.segments.push_back(lent[i].segment);
  }
  if (pass.segments.empty()) return false;
  outgoing.lending = Outgoing::Lending::asked;
  outgoing.connection = connection;
  sink_.add(std::move(pass));
  return true;
}

// A loan, once given, is named in every attempt: the peer may have completed the one in which it
// was mapped, or one with bytes.
bool LoansGiven::lend(const wire::PathTraits& traits, Outgoing& outgoing, std::size_t which,
                      wire::PartHead& part) {
  const bool possible =
      outgoing.lending == Outgoing::Lending::possible && may_lend(traits, outgoing, which);
  std::uint64_t& loan = outgoing.loans[which];
  if (possible && loan == 0) {
    loan = ++last_;
    const wire::LentPart& lent = outgoing.message.payload.lent[which];
    if (lent.out != nullptr) *lent.out = true;
    loans_.emplace(loan, Loan{outgoing.bytes_of(lent.part), lent.out});
  }
  part.id = loan;
  return possible;
}

void LoansGiven::returned(const Buffer& body) {
  for (const std::uint64_t loan : wire::decode<wire::Return>(body).loans) {
    const auto found = loans_.find(loan);
    if (found == loans_.end()) wire::fail("a loan was returned that was not given");
    if (found->second.out != nullptr) *found->second.out = false;
    loans_.erase(found);
  }
}

void LoansGiven::clear() {
  loans_.clear();
  last_ = 0;
}

void LoansHeld::add(std::uint64_t loan) {
  if (!loans_.insert(loan).second) wire::fail("a loan was given twice");
}

void LoansHeld::end(std::uint64_t loan) {
  if (loans_.erase(loan) == 1) due_.push_back(loan);
}

std::size_t LoansHeld::count() const { return std::min(due_.size(), kReturnsInMessage); }

OutgoingMessage LoansHeld::next_returns() const {
  OutgoingMessage message;
  message.kind = kReturnKind;
  const auto end = due_.begin() + static_cast<std::ptrdiff_t>(count());
  message.payload.body = wire::encode(wire::Return{{due_.begin(), end}});
  return message;
}

void LoansHeld::sent() {
  due_.erase(due_.begin(), due_.begin() + static_cast<std::ptrdiff_t>(count()));
}

void LoansHeld::clear() {
  loans_.clear();
  due_.clear();
}

}  // namespace moolink::session
