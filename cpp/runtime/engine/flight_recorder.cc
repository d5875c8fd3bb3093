#include "runtime/engine/flight_recorder.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace moolink::runtime {

std::vector<FlightEvent> FlightRecorder::last(std::size_t most, std::string_view here) const {
  std::vector<FlightEvent> found;
  const std::size_t held = static_cast<std::size_t>(std::min<std::uint64_t>(recorded_, kEvents));
  const std::string_view cut = here.substr(0, FlightEvent{}.here.size() - 1);
  for (std::size_t back = 1; back <= held && found.size() < most; ++back) {
    const FlightEvent& event = events_[(next_ + kEvents - back) % kEvents];
    if (here.empty() || cut == event.here.data()) found.push_back(event);
  }
  std::reverse(found.begin(), found.end());
  return found;
}

std::string line_of(const FlightEvent& event, Time now) {
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
