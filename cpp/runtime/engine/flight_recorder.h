#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "base/enum_names.h"
#include "base/time.h"

namespace moolink::runtime {

enum class FlightKind : std::uint8_t {
  call,         // id, function
  result,       // id; nothing, or the error
  handler,      // id at the caller, function
  reply,        // id at the caller; nothing, or the error
  stop,         // id at the caller, which does not wait any more
  dial,         // address
  dial_failed,  // the address's error
  opened,       // connection, address
  closed,       // connection, why
  sent,         // connection; a frame of the session's control
  received,     // likewise
  peer_up,
  peer_down,  // how
  service,    // number of the service
  view,       // epoch, members
};

inline constexpr auto kFlightKinds = enum_names<FlightKind::view>(
    "call", "result", "handler", "reply", "stop", "dial", "dial failed", "opened", "closed", "sent",
    "received", "peer up", "peer down", "service", "view");

struct FlightEvent {
  Time at{};
  std::uint64_t id = 0;
  FlightKind kind{};
  // Truncated if longer; zero-terminated.
  std::array<char, 23> here{};
  std::array<char, 31> peer{};
  std::array<char, 57> text{};
};

// The last events of a context, for later diagnosis. Recording copies into memory allocated at the
// start, so it can always stay on.
class FlightRecorder {
 public:
  static constexpr std::size_t kEvents = 1000;

  FlightRecorder() : events_(kEvents) {}

  void record(Time at, FlightKind kind, std::string_view here, std::string_view peer,
              std::uint64_t id, std::string_view text) {
    FlightEvent& event = events_[next_];
    next_ = next_ + 1 == kEvents ? 0 : next_ + 1;
    ++recorded_;
    event.at = at;
    event.id = id;
    event.kind = kind;
    put(here, event.here);
    put(peer, event.peer);
    put(text, event.text);
  }

  std::uint64_t recorded() const { return recorded_; }
  // The last `most` events of `here` (empty: of all), oldest first.
  std::vector<FlightEvent> last(std::size_t most, std::string_view here = {}) const {
    std::vector<FlightEvent> found;
    const std::size_t held = static_cast<std::size_t>(std::min<std::uint64_t>(recorded_, kEvents));
    const std::string_view cut = here.substr(0, FlightEvent{}.here.size() - 1);
    for (std::size_t back = 1; back <= held && found.size() < most; ++back) {
      const FlightEvent& event = events_[(next_ + kEvents - back) % kEvents];
      if (here.empty() || cut == event.here.data()) found.push_back(event);
    }
    std::ranges::reverse(found);
    return found;
  }

 private:
  template <std::size_t size>
  static void put(std::string_view text, std::array<char, size>& into) {
    const std::size_t bytes = text.size() < size ? text.size() : size - 1;
    text.copy(into.data(), bytes);
    into[bytes] = '\0';
  }

  std::vector<FlightEvent> events_;
  std::size_t next_ = 0;
  std::uint64_t recorded_ = 0;
};

// "  -1.250 s  learner  handler 17  actor-3  act": times count back from `now`.
inline std::string line_of(const FlightEvent& event, Time now) {
  char line[192];
  const double ago = std::chrono::duration<double>(now - event.at).count();
  std::snprintf(line, sizeof line, "%10.4f s  %s  %s %llu  %s  %s", -ago, event.here.data(),
                kFlightKinds[event.kind], static_cast<unsigned long long>(event.id),
                event.peer.data(), event.text.data());
  std::string text(line);
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

}  // namespace moolink::runtime
