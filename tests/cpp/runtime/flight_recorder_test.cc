#include "runtime/engine/flight_recorder.h"

#include <cstdlib>
#include <new>
#include <string>

#include "check.h"

#if MOOLINK_TEST_OWN_NEW
namespace {

thread_local std::size_t allocations = 0;

}  // namespace

// Counts, so that a test can see that nothing is allocated.
void* operator new(std::size_t size) {
  ++allocations;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// AddressSanitizer's version of this operator does not match the operator delete below.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace moolink::runtime {
namespace {

Time at(int milliseconds_of) { return Time{milliseconds(milliseconds_of)}; }

TEST("the recorder keeps the last thousand events, in order") {
  FlightRecorder recorder;
  CHECK(recorder.last(10).empty());
  for (int i = 0; i < 2500; ++i) {
    recorder.record(at(i), FlightKind::call, "learner", "actor", static_cast<std::uint64_t>(i),
                    "act");
  }
  CHECK_EQ(recorder.recorded(), 2500u);
  const auto all = recorder.last(FlightRecorder::kEvents + 5);
  CHECK_EQ(all.size(), FlightRecorder::kEvents);
  for (std::size_t i = 0; i < all.size(); ++i) CHECK_EQ(all[i].id, 1500 + i);
  const auto few = recorder.last(3);
  CHECK_EQ(few.size(), 3u);
  CHECK_EQ(few.front().id, 2497u);
  CHECK_EQ(few.back().id, 2499u);
}

TEST("a recorder that is not full shows what there is, of one peer if asked") {
  FlightRecorder recorder;
  recorder.record(at(1), FlightKind::dial, "a", "", 0, "tcp://10.0.0.1:1");
  recorder.record(at(2), FlightKind::handler, "b", "a", 7, "act");
  recorder.record(at(3), FlightKind::reply, "a", "b", 7, "");
  CHECK_EQ(recorder.last(10).size(), 3u);
  const auto of_a = recorder.last(10, "a");
  CHECK_EQ(of_a.size(), 2u);
  CHECK(of_a.back().kind == FlightKind::reply);
}

TEST("names and texts that are too long are cut off") {
  FlightRecorder recorder;
  const std::string name(1000, 'n');
  const std::string text(1000, 't');
  recorder.record(at(1), FlightKind::closed, name, name, 1, text);
  const FlightEvent event = recorder.last(1).at(0);
  CHECK_EQ(std::string(event.here.data()), name.substr(0, event.here.size() - 1));
  CHECK_EQ(std::string(event.peer.data()), name.substr(0, event.peer.size() - 1));
  CHECK_EQ(std::string(event.text.data()), text.substr(0, event.text.size() - 1));
  CHECK_EQ(recorder.last(1, name).size(), 1u);
  CHECK(line_of(event, at(1001)).starts_with("   -1.0000 s  nnn"));
}

#if MOOLINK_TEST_OWN_NEW
TEST("recording allocates nothing") {
  FlightRecorder recorder;
  const std::size_t before = allocations;
  for (std::uint64_t i = 0; i < 5000; ++i) {
    recorder.record(at(1), FlightKind::result, "learner-0", "actor-17", i,
                    "'act' at peer 'actor-17' timed out after 120 s");
  }
  CHECK_EQ(allocations, before);
}
#endif

}  // namespace
}  // namespace moolink::runtime
