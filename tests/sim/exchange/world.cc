#include "exchange/world.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "common/program.h"

namespace moolink::sim {
namespace {

using collective::Compression;
using collective::ReduceOp;
using tensor::DType;

double element_of(DType dtype, const std::byte* data, std::uint64_t index) {
  const auto read = [&]<class T>(T value) {
    std::memcpy(&value, data + index * sizeof(T), sizeof(T));
    return value;
  };
  switch (dtype) {
    case DType::float32:
      return static_cast<double>(read(float{}));
    case DType::float64:
      return read(double{});
    case DType::int32:
      return read(std::int32_t{});
    case DType::uint8:
      return read(std::uint8_t{});
    case DType::float16:
      return static_cast<double>(collective::half_to_float(read(std::uint16_t{})));
    default:
      return static_cast<double>(collective::bfloat16_to_float(read(std::uint16_t{})));
  }
}

void write_element(DType dtype, std::byte* data, std::uint64_t index, double number) {
  const auto write = [&]<class T>(T value) {
    std::memcpy(data + index * sizeof(T), &value, sizeof(T));
  };
  switch (dtype) {
    case DType::float32:
      return write(static_cast<float>(number));
    case DType::float64:
      return write(number);
    case DType::int32:
      return write(static_cast<std::int32_t>(number));
    case DType::uint8:
      return write(static_cast<std::uint8_t>(number));
    case DType::float16:
      return write(collective::float_to_half(static_cast<float>(number)));
    default:
      return write(collective::float_to_bfloat16(static_cast<float>(number)));
  }
}

}  // namespace

void ExchangeWorld::draw() {
  Random& random = simulation_.random;
  const auto ranks = static_cast<std::uint32_t>(2 + random.below(10));
  const std::uint64_t hosts = 1 + random.below(std::min(9u, ranks));
  std::vector<Uid> keys;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) keys.push_back({1, random.below(hosts)});
  hosts_ = collective::hosts_of(keys);
  const DType dtypes[] = {DType::float32, DType::float32,  DType::float32,
                          DType::float32, DType::float64,  DType::int32,
                          DType::uint8,   DType::bfloat16, DType::float16};
  spec_.dtype = dtypes[random.below(std::size(dtypes))];
  const ReduceOp ops[] = {ReduceOp::sum,     ReduceOp::mean,   ReduceOp::min,    ReduceOp::max,
                          ReduceOp::bit_and, ReduceOp::bit_or, ReduceOp::bit_xor};
  do {
    spec_.op = ops[random.below(std::size(ops))];
  } while (!collective::is_supported(spec_.dtype, spec_.op));
  const bool averages = spec_.op == ReduceOp::sum || spec_.op == ReduceOp::mean;
  if (averages && random.chance(1, 2)) draw_roles();
  const std::size_t contributors = spec_.contributors.empty() ? ranks : spec_.contributors.size();
  spec_.divisor = spec_.op == ReduceOp::mean ? static_cast<double>(contributors) : 1;
  const std::uint64_t counts[] = {0, 1, 100, 5000, 20000, 40000, 100003};
  const std::uint64_t count = counts[random.below(std::size(counts))];
  beside_ = random.chance(1, 2);
  chains_ = 1 + random.below(random.chance(1, 2) ? 4 : 40);
  spec_.shape = {static_cast<std::int64_t>(count)};
  if (spec_.dtype == DType::float32 && averages && random.chance(3, 4)) {
    spec_.compression = random.chance(1, 2) ? Compression::bf16 : Compression::int8;
  }
  whole_numbers_ = spec_.compression == Compression::none && random.chance(1, 2);
}

// As in a round of an accumulator: only some have an input.
void ExchangeWorld::draw_roles() {
  for (std::uint32_t rank = 0; rank < hosts_.of.size(); ++rank) {
    if (simulation_.random.chance(1, 2)) spec_.contributors.push_back(rank);
  }
  if (spec_.contributors.empty()) spec_.contributors.push_back(0);
  for (const std::vector<std::uint32_t>& ranks : hosts_.ranks) {
    if (std::none_of(ranks.begin(), ranks.end(), [this](auto rank) { return contributes(rank); })) {
      ++coverage["hosts without contributors"];
    }
  }
}

bool ExchangeWorld::contributes(std::size_t rank) const {
  const std::vector<std::uint32_t>& ranks = spec_.contributors;
  return ranks.empty() || std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

void ExchangeWorld::draw_inputs() {
  const std::uint64_t count = spec_.count();
  for (std::size_t rank = 0; rank < hosts_.of.size(); ++rank) {
    if (!contributes(rank)) {
      inputs_.emplace_back();
      continue;
    }
    const MutableBuffer input = heap_.allocate(spec_.byte_size());
    Random random(simulation_.random.next());
    for (std::uint64_t i = 0; i < count; ++i) {
      const double whole = static_cast<double>(random.below(16));
      const double any = static_cast<double>(random.below(1u << 24)) / (1 << 20) - 4;
      const bool integer = spec_.dtype == DType::int32 || spec_.dtype == DType::uint8;
      write_element(spec_.dtype, input.data(), i, whole_numbers_ || integer ? whole : any);
    }
    inputs_.push_back(input);
  }
}

MutableBuffer ExchangeWorld::filled(std::size_t bytes) {
  const MutableBuffer memory = heap_.allocate(bytes);
  if (bytes != 0) std::memset(memory.data(), 0, bytes);
  return memory;
}

void ExchangeWorld::run() {
  draw();
  draw_inputs();
  const bool compresses = spec_.compression != Compression::none;
  residuals_.resize(hosts_.count());
  for (auto& residuals : residuals_) {
    for (std::uint32_t lane = 0; lane < hosts_.lanes; ++lane) {
      residuals.push_back(compresses ? filled(spec_.byte_size()) : MutableBuffer());
    }
  }
  totals_.assign(spec_.count(), 0);
  const std::size_t times = compresses ? 6 : 1;
  for (std::size_t time = 0; time < times; ++time) {
    reduce_once();
    check_same_bits();
    for (std::uint64_t i = 0; i < totals_.size(); ++i) {
      totals_[i] += element_of(spec_.dtype, results_[0].data(), i);
    }
  }
  check_values(times);
  ++coverage[hosts_.count() == 1 ? "one host" : "several hosts"];
  if (hosts_.count() > 1 && hosts_.lanes > 1) ++coverage["several leaders of a host"];
  if (hosts_.count() == 3 || hosts_.count() > 4) ++coverage["no power of two"];
  const bool small = schedule() != collective::Schedule::tree;
  ++coverage[small ? "small" : "large"];
  if (schedule() == collective::Schedule::star) ++coverage["star"];
  if (!small && chains_ > 8) ++coverage["many chains"];
  if (compresses && !small && hosts_.count() > 1) ++coverage["compressed"];
}

collective::Schedule ExchangeWorld::schedule() const {
  const std::size_t partial_size = tensor::item_size(collective::partial_dtype(spec_.dtype));
  return collective::schedule_for(spec_.count() * partial_size, hosts_.count(),
                                  spec_.compression != Compression::none, beside_);
}

// A lane's share of every chunk; of a small payload, one.
std::vector<collective::Range> ExchangeWorld::chains_of(std::uint32_t lane) const {
  const std::size_t item_size = tensor::item_size(spec_.dtype);
  const std::size_t chunks = schedule() == collective::Schedule::tree ? chains_ : 1;
  std::vector<collective::Range> chains;
  for (const auto& chunk : collective::even_slices(spec_.count(), item_size, chunks)) {
    const auto slice = collective::even_slices(chunk.count(), item_size, hosts_.lanes)[lane];
    chains.push_back({chunk.begin + slice.begin, chunk.begin + slice.end});
  }
  return chains;
}

void ExchangeWorld::reduce_once() {
  const std::size_t partial_size = tensor::item_size(collective::partial_dtype(spec_.dtype));
  sums_.clear();
  results_.clear();
  leaders_.clear();
  for (std::uint32_t host = 0; host < hosts_.count(); ++host) {
    collective::SumTask task{spec_.dtype, spec_.op, 1, {}, filled(spec_.count() * partial_size)};
    task.partial_output = true;
    for (const std::uint32_t rank : hosts_.ranks[host]) {
      if (contributes(rank)) task.inputs.push_back(inputs_[rank]);
    }
    if (!task.inputs.empty()) collective::run(task);
    sums_.emplace_back(task.output);
    results_.push_back(filled(spec_.byte_size()));
    for (std::uint32_t lane = 0; lane < hosts_.lanes; ++lane) {
      collective::Exchange::Plan plan;
      plan.hosts = hosts_.count();
      plan.host = host;
      plan.chains = chains_of(lane);
      plan.schedule = schedule();
      plan.first = lane;
      plan.dtype = spec_.dtype;
      plan.op = spec_.op;
      plan.divisor = spec_.divisor;
      plan.compression = spec_.compression;
      Leader& leader = leaders_.emplace_back();
      leader.host = host;
      leader.lane = lane;
      const bool given = simulation_.random.chance(1, 2);
      leader.exchange = std::make_unique<collective::Exchange>(
          std::move(plan), given ? results_[host] : MutableBuffer(), residuals_[host][lane], heap_);
    }
  }
  std::size_t limit = 1'000'000;
  while (go_on()) require(--limit > 0, "the reduction does not come to an end");
  for (const Leader& leader : leaders_) {
    require(
        leader.results == chains_of(leader.lane).size(),
        "a leader of host " + std::to_string(leader.host) + " waits although nothing is under way");
  }
}

// One thing that can be done, drawn at random; false when there is none.
bool ExchangeWorld::go_on() {
  std::vector<std::pair<int, std::size_t>> choices;
  for (std::size_t i = 0; i < leaders_.size(); ++i) {
    if (leaders_[i].provided < chains_of(leaders_[i].lane).size()) choices.emplace_back(0, i);
    if (!leaders_[i].tasks.empty()) choices.emplace_back(1, i);
  }
  for (std::size_t i = 0; i < under_way_.size(); ++i) choices.emplace_back(2, i);
  if (choices.empty()) return false;
  const auto [what, index] = choices[simulation_.random.below(choices.size())];
  simulation_.trace.add(static_cast<std::uint64_t>(what) * 1000 + index);
  if (what == 2) {
    deliver(index);
    return true;
  }
  Leader& leader = leaders_[index];
  if (what == 0) {
    provide(leader);
  } else {
    const std::size_t chosen = simulation_.random.below(leader.tasks.size());
    const collective::Exchange::Task task = std::move(leader.tasks[chosen]);
    leader.tasks.erase(leader.tasks.begin() + static_cast<std::ptrdiff_t>(chosen));
    collective::run(task.work);
    leader.exchange->done(task.id);
  }
  take_effects(static_cast<std::uint32_t>(index));
  return true;
}

void ExchangeWorld::provide(Leader& leader) {
  const std::size_t size = tensor::item_size(collective::partial_dtype(spec_.dtype));
  const collective::Range range = leader.exchange->range(leader.provided);
  leader.exchange->provide(leader.provided++,
                           sums_[leader.host].slice(range.begin * size, range.count() * size));
}

void ExchangeWorld::deliver(std::size_t index) {
  const Message message = std::move(under_way_[index]);
  under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(index));
  const auto& [host, chain, round, elements] = message.content;
  const bool expected =
      leaders_[message.to].exchange->received(leaders_[message.from].host, chain, round, elements);
  require(expected, "host " + std::to_string(host) + " did not expect what host " +
                        std::to_string(leaders_[message.from].host) + " sent");
  take_effects(message.to);
}

void ExchangeWorld::take_effects(std::uint32_t index) {
  Leader& leader = leaders_[index];
  auto effects = leader.exchange->take_effects();
  for (auto& outgoing : effects.outgoing) {
    require(outgoing.host != leader.host, "a host sends to itself");
    const std::uint32_t to = outgoing.host * hosts_.lanes + leader.lane;
    under_way_.push_back({index, to, std::move(outgoing)});
  }
  for (auto& task : effects.tasks) leader.tasks.push_back(std::move(task));
  for (const auto& result : effects.results) {
    const std::size_t item_size = tensor::item_size(spec_.dtype);
    std::byte* place =
        results_[leader.host].data() + leader.exchange->range(result.chain).begin * item_size;
    if (!result.elements.empty() && result.elements.data() != place) {
      std::memcpy(place, result.elements.data(), result.elements.size());
    }
    ++leader.results;
  }
}

void ExchangeWorld::check_same_bits() {
  for (std::size_t host = 1; host < results_.size(); ++host) {
    require(spec_.byte_size() == 0 ||
                std::memcmp(results_[0].data(), results_[host].data(), spec_.byte_size()) == 0,
            "hosts 0 and " + std::to_string(host) + " have different bits");
  }
}

double ExchangeWorld::exact(std::uint64_t element) const {
  std::size_t rank = 0;
  while (!contributes(rank)) ++rank;
  double value = element_of(spec_.dtype, inputs_[rank].data(), element);
  while (++rank < inputs_.size()) {
    if (!contributes(rank)) continue;
    const double next = element_of(spec_.dtype, inputs_[rank].data(), element);
    const auto a = static_cast<std::int64_t>(value);
    const auto b = static_cast<std::int64_t>(next);
    switch (spec_.op) {
      case ReduceOp::sum:
      case ReduceOp::mean:
      case ReduceOp::prod:
        value += next;
        break;
      case ReduceOp::min:
        value = std::min(value, next);
        break;
      case ReduceOp::max:
        value = std::max(value, next);
        break;
      case ReduceOp::bit_and:
        value = static_cast<double>(a & b);
        break;
      case ReduceOp::bit_or:
        value = static_cast<double>(a | b);
        break;
      case ReduceOp::bit_xor:
        value = static_cast<double>(a ^ b);
        break;
    }
  }
  return value / spec_.divisor;
}

// The mean of the results of several times: what compression loses is made good later.
void ExchangeWorld::check_values(std::size_t times) {
  const auto ranks = static_cast<double>(hosts_.of.size());
  const double greatest = whole_numbers_ ? 15 : 12;
  double allowed = 0;
  if (spec_.dtype == DType::float32) allowed = ranks * greatest * 0x1p-20;
  if (spec_.dtype == DType::float64) allowed = ranks * greatest * 0x1p-48;
  if (spec_.dtype == DType::float16) allowed = ranks * greatest * 0x1p-10;
  if (spec_.dtype == DType::bfloat16) allowed = ranks * greatest * 0x1p-7;
  if (whole_numbers_ && spec_.dtype == DType::float32 && spec_.op != ReduceOp::mean) allowed = 0;
  if (spec_.compression != Compression::none) {
    const double coarse = spec_.compression == Compression::bf16 ? 0x1p-8 : 1.0 / 250;
    const auto hops = static_cast<double>(hosts_.count());
    // Every hop keeps at most half a step back, which is there once, not once a time.
    allowed =
        ranks * greatest * hops * coarse / static_cast<double>(times) / spec_.divisor + allowed;
  }
  for (std::uint64_t i = 0; i < spec_.count(); ++i) {
    const double mean = totals_[i] / static_cast<double>(times);
    require(std::fabs(mean - exact(i)) <= allowed, spec_.text() + ", element " + std::to_string(i) +
                                                       ": " + std::to_string(mean) +
                                                       " instead of " + std::to_string(exact(i)));
  }
}

}  // namespace moolink::sim
