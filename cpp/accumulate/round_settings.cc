#include "accumulate/round_settings.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/format.h"
#include "base/names.h"

namespace moolink::accumulate {

void RoundSettings::set_virtual_batch_size(std::int64_t size) {
  if (size < 1) {
    throw Exception(ErrorCode::invalid_argument,
                    "the virtual batch size must be positive, not " + std::to_string(size));
  }
  virtual_batch_size_ = size;
  if (epoch_.is_leader()) announce();
}

void RoundSettings::set_parallel_gradients(std::uint32_t rounds) {
  if (rounds < 1 || rounds > kMostParallel) {
    throw Exception(ErrorCode::invalid_argument,
                    "the number of parallel gradients is between 1 and " +
                        std::to_string(kMostParallel) + ", not " + std::to_string(rounds));
  }
  parallel_gradients_ = rounds;
  if (epoch_.is_leader()) announce();
}

Settings RoundSettings::own() const {
  return {std::max<std::int64_t>(1, virtual_batch_size_),
          std::max<std::uint32_t>(1, parallel_gradients_)};
}

bool RoundSettings::learn(const Uid& from, const Settings& settings) {
  const bool possible =
      settings.virtual_batch_size >= 1 && settings.virtual_batch_size <= kLargestBatch &&
      settings.parallel_gradients >= 1 && settings.parallel_gradients <= kMostParallel;
  if (from != epoch_.leader() || !possible) return false;
  leaders_ = settings;
  return true;
}

// The user's settings that differ from the leader's, if any.
std::string RoundSettings::difference(const Settings& leaders) const {
  const auto told = [this](const char* what, auto theirs, auto mine, const char* method) {
    return std::string("the ") + what + " is " + std::to_string(theirs) + " at the leader '" +
           epoch_.name_of(epoch_.leader()) + "' and " + std::to_string(mine) + " at this peer, '" +
           config_.name + "': call " + method + "() with the same number on every peer";
  };
  if (virtual_batch_size_ != 0 && virtual_batch_size_ != leaders.virtual_batch_size) {
    return told("virtual batch size", leaders.virtual_batch_size, virtual_batch_size_,
                "set_virtual_batch_size");
  }
  if (parallel_gradients_ != 0 && parallel_gradients_ != leaders.parallel_gradients) {
    return told("number of parallel gradients", leaders.parallel_gradients, parallel_gradients_,
                "set_parallel_gradients");
  }
  return {};
}

void RoundSettings::watch() {
  if (!epoch_.takes_part() || config_.role == group::Role::observer) return;
  if (!epoch_.is_leader() && !leaders_) return;  // not known in this epoch yet
  const std::string text = epoch_.is_leader() ? std::string() : difference(*leaders_);
  if (text.empty()) {
    differs_since_ = kNever;
    if (std::exchange(has_failed_, false)) outbox_.act(Failed{});
    return;
  }
  if (differs_since_ == kNever) differs_since_ = clock_.now();
  if (clock_.now() < differs_since_ + config_.settings_timeout) return;
  if (std::exchange(has_failed_, true)) return;
  outbox_.act(Failed{{.code = ErrorCode::invalid_argument,
                      .message = "for " + in_seconds(config_.settings_timeout) + " " + text,
                      .function = joined_names_text(config_.group)}});
}

}  // namespace moolink::accumulate
