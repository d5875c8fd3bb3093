#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace moolink::session {

// Message numbers that are complete: all up to cum(), and some above it.
class SequenceSet {
 public:
  // Every number up to this one is in the set.
  std::uint64_t cum() const { return cum_; }
  bool has_gaps() const { return greatest_ > cum_; }

  bool contains(std::uint64_t seq) const {
    if (seq <= cum_) return true;
    const std::size_t word = static_cast<std::size_t>(seq / 64 - first_word_);
    return word < words_.size() && ((words_[word] >> (seq % 64)) & 1) != 0;
  }

  // False if it was there. The caller bounds seq - cum().
  bool insert(std::uint64_t seq) {
    if (contains(seq)) return false;
    if (seq > greatest_) greatest_ = seq;
    if (seq == cum_ + 1 && greatest_ == seq) {  // the usual case: nothing above is known
      cum_ = seq;
      words_.clear();
      return true;
    }
    if (words_.empty()) first_word_ = (cum_ + 1) / 64;
    const std::size_t word = static_cast<std::size_t>(seq / 64 - first_word_);
    if (word >= words_.size()) words_.resize(word + 1, 0);
    words_[word] |= std::uint64_t{1} << (seq % 64);
    if (seq == cum_ + 1) advance();
    return true;
  }

  // Bit i of word w: cum() + 1 + 64 w + i is in the set; no trailing zero words (wire::Ack).
  std::vector<std::uint64_t> bitmap() const {
    std::vector<std::uint64_t> bits;
    if (!has_gaps()) return bits;
    bits.resize(static_cast<std::size_t>((greatest_ - cum_ - 1) / 64 + 1), 0);
    for (std::uint64_t seq = cum_ + 1; seq <= greatest_; ++seq) {
      const std::uint64_t i = seq - cum_ - 1;
      if (contains(seq)) bits[static_cast<std::size_t>(i / 64)] |= std::uint64_t{1} << (i % 64);
    }
    return bits;
  }

 private:
  void advance() {
    while (contains_above(cum_ + 1)) ++cum_;
    while (!words_.empty() && first_word_ < (cum_ + 1) / 64) {
      words_.pop_front();
      ++first_word_;
    }
  }
  bool contains_above(std::uint64_t seq) const {
    const std::size_t word = static_cast<std::size_t>(seq / 64 - first_word_);
    return word < words_.size() && ((words_[word] >> (seq % 64)) & 1) != 0;
  }

  std::uint64_t cum_ = 0;
  std::uint64_t greatest_ = 0;
  std::uint64_t first_word_ = 0;     // number of words_[0], of 64 messages each
  std::deque<std::uint64_t> words_;  // empty while there are no gaps
};

}  // namespace moolink::session
