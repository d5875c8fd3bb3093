// How an operation fails, here and elsewhere, and the members it waits for.

#include <algorithm>

#include "collective/operation.h"

namespace moolink::collective {

std::string Operation::difference(std::uint32_t from, const OpSpec& theirs) const {
  return name_of(from) + " has " + theirs.text() + ", " + name_of(place_.rank) + " has " +
         spec()->text();
}

void Operation::refuse(std::uint32_t from, const std::string& what) {
  fail({.code = ErrorCode::error,
        .message = "operation '" + key_.name + "' of " + name_of(place_.rank) + " and " +
                   name_of(from) + " does not fit: " + what + "; all members must pass the same",
        .peer = name_of(from),
        .function = key_.name});
}

// A member that this one waits for, and that may wait for others itself.
std::optional<std::uint32_t> Operation::member_to_ask() const {
  if (spec() == nullptr || (asks_ && !went_)) return 0;
  if (!exchange_ || shared_ != 0) return std::nullopt;
  const std::set<std::uint32_t> hosts = exchange_->waiting_for();
  if (hosts.empty()) return std::nullopt;
  return exchanging_rank(*hosts.begin());
}

bool Operation::ask_why(const Error& error) {
  const auto asked = member_to_ask();
  if (!asked || *asked == place_.rank || effects_.finished || error_) return false;
  Outgoing& question = effects_.outgoing.emplace_back();
  question.to = *asked;
  question.content.emplace<Failure>(Failure{error, 0, true});
  return true;
}

void Operation::failed_elsewhere(std::uint32_t from, const Failure& said) {
  Failure failure = said;
  if (!failure.error) {  // without one it would end here as if it had succeeded
    failure.error = make_error(ErrorCode::error, "operation '" + key_.name + "' failed at " +
                                                     name_of(from) + ", which does not say why");
  }
  if (failure.asks_why) {
    Error error = failure.error;
    const std::vector<std::string> lacking = waiting_for();
    if (!lacking.empty()) error.message += "; " + name_of(place_.rank) + " waits for:";
    for (const std::string& name : lacking) error.message += " " + name;
    return fail(std::move(error));
  }
  if (asks_ && from == 0) {  // it also tells whether it had sent Go before
    if (!went_ && failure.shared != 0) effects_.pass = shared_ = failure.shared;
    went_ = true;
  }
  fail(failure.error, true);
}

void Operation::fail(Error error, bool local) {
  if (effects_.finished || error_ || ending_) return;
  error_ = std::move(error);
  // All must know that rank 0 will not send Go any more.
  const bool last_word = asks_ && !went_ && place_.rank == 0;
  if (!local || last_word) to_others(Failure{error_, place_.rank == 0 ? shared_ : 0, false}, {});
  effects_.tasks.clear();
  effects_.publish.clear();
  effects_.combine.reset();
  effects_.ready_to_go = false;
  if (shared_ != 0 && !effects_.pass && !is_guest()) effects_.abandon = shared_;
  effects_.unsettled = asks_ && !went_ && place_.rank != 0;
  effects_.finished = true;
}

std::vector<std::string> Operation::waiting_for() const {
  std::vector<std::string> names;
  const auto all_but = [&](const auto& arrived, bool pieces = false) {
    for (std::uint32_t rank = 0; rank < members().size(); ++rank) {
      const bool sends = !pieces || passes(passage_, rank, place_.rank);
      if (sends && !arrived.contains(rank)) names.push_back(name_of(rank));
    }
    return names;
  };
  if (spec() == nullptr) {
    if (place_.rank != 0) return {name_of(0)};
    if (values_.empty()) return {};  // the Python operation runs
    return all_but(values_);
  }
  if (asks_ && !went_) {
    if (place_.rank != 0) return {name_of(0)};
    return all_but(started_);
  }
  if (exchange_) {
    for (const std::uint32_t host : exchange_->waiting_for()) {
      names.push_back(name_of(exchanging_rank(host)));
    }
    return names;
  }
  if (!awaited_.empty()) {
    const std::size_t chains = awaited_.size() / hosts().lanes;
    for (std::uint32_t lane = 0; lane < hosts().lanes; ++lane) {
      const auto first = have_.begin() + static_cast<std::ptrdiff_t>(lane * chains);
      const bool lacks = std::find(first, first + static_cast<std::ptrdiff_t>(chains), 0) !=
                         first + static_cast<std::ptrdiff_t>(chains);
      if (lacks) names.push_back(name_of(hosts().leader(hosts().of[place_.rank], lane)));
    }
    return names;
  }
  return uses_messages_ && !is_all_reduce() ? all_but(pieces_, true) : names;
}

}  // namespace moolink::collective
