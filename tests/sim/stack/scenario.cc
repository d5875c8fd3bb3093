#include "stack/scenario.h"

#include <algorithm>
#include <array>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace moolink::sim {
namespace {

using Kind = Event::Kind;

struct KindText {
  Kind kind;
  std::string_view text;
  bool two;    // names another process
  bool lasts;  // has a duration
};

constexpr std::array kKinds = {
    KindText{Kind::start, "start", false, false},   KindText{Kind::crash, "crash", false, false},
    KindText{Kind::vanish, "vanish", false, false}, KindText{Kind::leave, "leave", false, false},
    KindText{Kind::stop, "stop", false, true},      KindText{Kind::isolate, "isolate", false, true},
    KindText{Kind::split, "split", true, true},     KindText{Kind::cut, "cut", true, false},
    KindText{Kind::slow, "slow", false, true},      KindText{Kind::away, "away", false, true}};

const KindText& text_of(Kind kind) {
  return *std::find_if(kKinds.begin(), kKinds.end(),
                       [kind](const KindText& known) { return known.kind == kind; });
}

// Each field of the head by its name.
template <class Head, class Visit>
void fields(Head& head, Visit visit) {
  visit("seed", head.seed);
  visit("roles", head.roles);
  visit("initial", head.initial);
  visit("hosts", head.hosts);
  visit("batch", head.batch);
  visit("parallel", head.parallel);
  visit("elements", head.elements);
  visit("share_wait", head.share_wait);
  visit("late", head.late);
  visit("calls", head.calls);
  visit("form", head.form);
  visit("settle", head.settle);
  visit("pause", head.pause);
}

[[noreturn]] void refuse(const std::string& line, const std::string& why) {
  throw std::invalid_argument("\"" + line + "\": " + why);
}

void check(const Scenario& scenario) {
  const auto wrong_role = [](char role) { return role != 'M' && role != 'O'; };
  if (scenario.roles.empty() ||
      std::any_of(scenario.roles.begin(), scenario.roles.end(), wrong_role)) {
    refuse("roles " + scenario.roles, "a role is M or O");
  }
  if (scenario.roles[0] != 'M') refuse("roles " + scenario.roles, "the first is a member");
  if (scenario.initial < 1 || scenario.initial >= scenario.processes() || scenario.hosts < 1 ||
      scenario.batch < 1 || scenario.parallel < 1 || scenario.elements < 1) {
    refuse(scenario.text(), "a number is out of bounds");
  }
}

Event parse_event(const std::string& line, std::istringstream& words, bool by_frame) {
  Event event;
  std::string kind;
  if (by_frame) {
    words >> event.frames_of >> event.frames >> kind;
  } else {
    words >> event.at_ms >> kind;
  }
  const auto known = std::find_if(kKinds.begin(), kKinds.end(),
                                  [&](const KindText& item) { return item.text == kind; });
  if (!words || known == kKinds.end()) refuse(line, "no such event");
  event.kind = known->kind;
  words >> event.process;
  if (known->two) words >> event.other;
  if (known->lasts) words >> event.ms;
  if (!words) refuse(line, "a number is missing");
  return event;
}

}  // namespace

bool Scenario::disturbs(const Event& event) {
  constexpr int kNothing = 1000;  // ms: far less than evict_after
  switch (event.kind) {
    case Kind::stop:
    case Kind::isolate:
    case Kind::split:
    case Kind::away:
      return event.ms > kNothing;
    default:
      return false;
  }
}

std::string Scenario::text() const {
  std::ostringstream out;
  fields(*this, [&](const char* name, const auto& value) { out << name << ' ' << value << '\n'; });
  for (const Event& event : events) {
    const KindText& kind = text_of(event.kind);
    if (event.frames_of >= 0) {
      out << "frame " << event.frames_of << ' ' << event.frames;
    } else {
      out << "at " << event.at_ms;
    }
    out << ' ' << kind.text << ' ' << event.process;
    if (kind.two) out << ' ' << event.other;
    if (kind.lasts) out << ' ' << event.ms;
    out << '\n';
  }
  return out.str();
}

Scenario Scenario::parse(const std::string& text) {
  Scenario scenario;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first;
    if (!(words >> first)) continue;
    if (first == "at" || first == "frame") {
      scenario.events.push_back(parse_event(line, words, first == "frame"));
      continue;
    }
    bool known = false;
    fields(scenario, [&](std::string_view name, auto& value) {
      if (name == first) known = static_cast<bool>(words >> value);
    });
    if (!known) refuse(line, "no such setting, or no value");
  }
  check(scenario);
  for (const Event& event : scenario.events) {
    const int most = scenario.processes() - 1;
    const bool fits = event.process >= 0 && event.process <= most && event.other >= 0 &&
                      event.other <= most && event.frames_of <= most && event.at_ms >= 0 &&
                      event.ms >= 0;
    if (!fits) refuse(text, "an event names a process that there is not, or a time before zero");
  }
  return scenario;
}

namespace {

// Draws lives in which most that can happen does.
class Author {
 public:
  explicit Author(std::uint64_t seed) : random_(seed * 0x9e3779b97f4a7c15ULL + 1) {
    scenario_.seed = seed;
    scenario_.roles.clear();
  }

  Scenario write() {
    scenario_.initial = 1 + number(5);
    for (int i = 0; i < scenario_.initial; ++i) add_role(i > 0);
    scenario_.hosts = 1 + number(2);
    scenario_.batch = 1 + number(10);
    scenario_.parallel = static_cast<std::uint32_t>(1 + number(3));
    scenario_.elements = random_.chance(3, 4) ? 16 : random_.chance(2, 3) ? 700 : 4000;
    scenario_.share_wait = random_.chance(1, 2) ? 0 : 50;
    scenario_.late = random_.chance(1, 3);
    scenario_.calls = random_.chance(1, 2);
    scenario_.form = random_.chance(1, 3) ? 5000 : 0;
    long_silences_ = random_.chance(1, 3);
    int now = 0;
    for (const int end = 2000 + number(5000); now < end; now += 20 + number(900)) misfortune(now);
    return scenario_;
  }

 private:
  int number(std::uint64_t bound) { return static_cast<int>(random_.below(bound)); }
  int between(int low, int high) { return low + number(static_cast<std::uint64_t>(high - low)); }
  int peer() { return 1 + number(scenario_.roles.size()); }
  int anybody() { return number(scenario_.roles.size() + 1); }
  bool is_long() { return number(6) < (long_silences_ ? 5 : 1); }

  int add_role(bool may_observe) {
    scenario_.roles += may_observe && random_.chance(1, 4) ? 'O' : 'M';
    return scenario_.processes() - 1;
  }

  Event& add(int at, Kind kind, int process) {
    Event event;
    event.kind = kind;
    event.process = process;
    event.at_ms = at;
    scenario_.events.push_back(event);
    return scenario_.events.back();
  }

  void restart_later(int at, int process) {
    if (random_.chance(2, 3)) add(at + between(10, 2500), Kind::start, process);
  }

  void silence(int at, Kind kind, int process) {
    add(at, kind, process).ms = is_long() ? between(2800, 5000) : between(20, 1500);
  }

  void misfortune(int now) {
    const int kind = number(100);
    if (kind < 12 && scenario_.roles.size() < 8) {
      add(now, Kind::start, add_role(true));
    } else if (kind < 36) {
      const int victim = peer();
      Event& event = add(now, Kind::crash, victim);
      event.frames_of = random_.chance(3, 4) ? victim : anybody();
      event.frames = static_cast<std::uint64_t>(now) / 4 + random_.below(200);
      restart_later(now + 500, victim);
    } else if (kind < 42) {
      const int victim = peer();
      add(now, random_.chance(1, 2) ? Kind::crash : Kind::vanish, victim);
      restart_later(now, victim);
    } else if (kind < 48) {
      const int victim = peer();
      add(now, Kind::leave, victim);
      restart_later(now + 200, victim);
    } else if (kind < 58) {
      silence(now, Kind::stop, anybody());
    } else if (kind < 68) {
      silence(now, Kind::isolate, anybody());
    } else if (kind < 72) {
      silence(now, Kind::split, peer());
      scenario_.events.back().other = anybody();
    } else if (kind < 80) {
      add(now, Kind::cut, anybody()).other = anybody();
    } else if (kind < 85) {
      add(now, Kind::slow, anybody()).ms = between(100, 2000);
    } else if (kind < 92) {
      add(now, Kind::away, peer()).ms =
          random_.chance(1, 4) ? between(2200, 4000) : between(50, 900);
    } else {
      Event& event = add(now, Kind::crash, 0);
      if (random_.chance(1, 2)) {
        event.frames_of = anybody();
        event.frames = static_cast<std::uint64_t>(now) / 4 + random_.below(100);
      }
      add(now + between(10, 3000), Kind::start, 0);
    }
  }

  Random random_;
  Scenario scenario_;
  bool long_silences_ = false;
};

}  // namespace

Scenario Scenario::random(std::uint64_t seed) { return Author(seed).write(); }

}  // namespace moolink::sim
