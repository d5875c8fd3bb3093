// Fails each allocation and each system call of a scenario once. docs: see usage() below.

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "faults.h"
#include "scenario.h"
#include "scenarios.h"

namespace moolink::injection {

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = {
      {"calls_over_tcp", calls_over_tcp},   {"calls_over_shm", calls_over_shm},
      {"lends_over_shm", lends_over_shm},   {"group_over_shm", group_over_shm},
      {"group_over_tcp", group_over_tcp},   {"rounds_over_shm", rounds_over_shm},
      {"rounds_over_tcp", rounds_over_tcp},
  };
  return all;
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRecordings = 3;  // runs differ, and so do the points that they reach
constexpr int kTries = 3;       // of a point that was not reached
constexpr std::chrono::seconds kHang{40};

struct Options {
  std::string scenario;    // empty: all
  std::string only;        // a point, in hexadecimal
  std::size_t sample = 0;  // points of each scenario, drawn by `seed`; 0: all
  unsigned seed = 1;
  std::size_t jobs = 4;  // they wait for most of the time
  bool verbose = false;
};

[[noreturn]] void usage() {
  std::fputs(
      "usage: injection [--scenario NAME] [--sample N] [--seed N] [--jobs N] [--point ID] [-v]\n"
      "Fails each allocation and each system call of each scenario once, in processes of their\n"
      "own, and says after which the library aborted, hung, or gave a wrong result or error.\n",
      stderr);
  std::exit(2);
}

// --- in the child

void run_once(const Scenario& scenario, Report& report) {
  const faults::Shield shield;
  scenario.run(report);
}

void say(std::FILE* out, const std::string& line) {
  std::fprintf(out, "%s\n", line.c_str());
  std::fflush(out);
}

void record_points(const Scenario& scenario, std::FILE* out) {
  faults::record();
  for (int i = 0; i < kRecordings; ++i) {
    Report report;
    run_once(scenario, report);
    for (const std::string& complaint : report.complaints()) say(out, "complaint " + complaint);
  }
  faults::rest();
  for (const faults::PointId id : faults::recorded()) {
    say(out, "point " + std::to_string(id) + " " + faults::describe(id));
  }
}

void fail_points(const Scenario& scenario, const std::vector<faults::PointId>& points,
                 std::FILE* out) {
  for (const faults::PointId id : points) {
    say(out, "begin " + std::to_string(id));
    Report report;
    const auto begun = Clock::now();
    faults::arm(id);
    run_once(scenario, report);
    faults::rest();
    if (faults::fired()) say(out, "fired " + std::to_string(id));
    for (const std::string& complaint : report.complaints()) say(out, "complaint " + complaint);
    if (!report.complaints().empty()) {
      for (const std::string& line : report.lines()) say(out, "log " + line);
    }
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begun);
    say(out, "end " + std::to_string(id) + " " + std::to_string(ms.count()));
  }
}

// --- in the parent

struct Outcome {
  bool fired = false;
  int tries = 0;
  long ms = 0;
  std::vector<std::string> complaints;
  std::vector<std::string> lines;
};

struct Run {
  std::map<faults::PointId, std::string> points;  // and their stacks
  std::vector<faults::PointId> order;
  std::map<faults::PointId, Outcome> outcomes;
  std::vector<std::string> complaints;  // without a fault
};

// A process that fails points one after the other, and what it is at.
struct Child {
  pid_t pid = 0;
  int pipe = -1;
  std::string text;  // read, not yet a line
  std::vector<faults::PointId> left;
  faults::PointId at = 0;
  Clock::time_point since{};
};

template <class Body>
Child start(const Body& body) {
  int ends[2];
  if (::pipe(ends) != 0) std::abort();
  std::fflush(nullptr);
  Child child;
  child.pid = ::fork();
  if (child.pid == 0) {
    ::close(ends[0]);
    std::FILE* out = ::fdopen(ends[1], "w");
    body(out);
    std::_Exit(0);
  }
  ::close(ends[1]);
  child.pipe = ends[0];
  child.since = Clock::now();
  return child;
}

void take_line(Run& run, Child& child, const std::string& line) {
  const std::size_t space = line.find(' ');
  const std::string word = line.substr(0, space);
  const std::string rest = space == std::string::npos ? "" : line.substr(space + 1);
  Outcome* outcome = child.at == 0 ? nullptr : &run.outcomes[child.at];
  if (word == "point") {
    const faults::PointId id = std::stoull(rest);
    if (run.points.emplace(id, rest.substr(rest.find(' ') + 1)).second) run.order.push_back(id);
  } else if (word == "begin") {
    child.at = std::stoull(rest);
    child.since = Clock::now();
    ++run.outcomes[child.at].tries;
  } else if (word == "fired") {
    outcome->fired = true;
  } else if (word == "complaint") {
    (outcome == nullptr ? run.complaints : outcome->complaints).push_back(rest);
  } else if (word == "log" && outcome != nullptr) {
    outcome->lines.push_back(rest);
  } else if (word == "end") {
    outcome->ms = std::stol(rest.substr(rest.find(' ') + 1));
    std::erase(child.left, child.at);
    child.at = 0;
  }
}

// Reads what there is; false: the process has ended.
bool read_from(Run& run, Child& child) {
  std::array<char, 4096> buffer;
  const ssize_t got = ::read(child.pipe, buffer.data(), buffer.size());
  if (got <= 0) return false;
  child.text.append(buffer.data(), static_cast<std::size_t>(got));
  for (std::size_t end = child.text.find('\n'); end != std::string::npos;
       end = child.text.find('\n')) {
    take_line(run, child, child.text.substr(0, end));
    child.text.erase(0, end + 1);
  }
  return true;
}

void reap(Run& run, Child& child, bool hung) {
  int status = 0;
  ::waitpid(child.pid, &status, 0);
  ::close(child.pipe);
  if (child.at == 0) {
    if (status != 0) run.complaints.push_back("the run without a fault ended the process");
    return;
  }
  Outcome& outcome = run.outcomes[child.at];
  outcome.fired = true;
  outcome.complaints.push_back(hung ? std::string("it hung")
                                    : "it ended the process: " +
                                          std::string(::strsignal(WTERMSIG(status))));
  std::erase(child.left, child.at);
}

void watch(Run& run, const Scenario& scenario, std::vector<faults::PointId> points,
           std::size_t jobs) {
  std::vector<Child> children;
  const auto begin = [&](std::vector<faults::PointId> some) {
    if (some.empty()) return;
    Child child = start([&](std::FILE* out) { fail_points(scenario, some, out); });
    child.left = std::move(some);
    children.push_back(std::move(child));
  };
  std::vector<std::vector<faults::PointId>> shares(jobs);
  for (std::size_t i = 0; i < points.size(); ++i) shares[i % jobs].push_back(points[i]);
  for (auto& share : shares) begin(std::move(share));
  while (!children.empty()) {
    std::vector<pollfd> fds;
    for (const Child& child : children) fds.push_back({child.pipe, POLLIN, 0});
    ::poll(fds.data(), fds.size(), 1000);
    for (std::size_t i = children.size(); i-- > 0;) {
      Child& child = children[i];
      const bool hung = child.at != 0 && Clock::now() - child.since > kHang;
      if (hung) ::kill(child.pid, SIGKILL);
      if (!hung && (fds[i].revents == 0 || read_from(run, child))) continue;
      reap(run, child, hung);
      std::vector<faults::PointId> left = std::move(child.left);
      children.erase(children.begin() + static_cast<std::ptrdiff_t>(i));
      begin(std::move(left));
    }
  }
}

std::string program_path() {
  std::array<char, 4096> path{};
  const ssize_t size = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
  return size > 0 ? path.data() : "";
}

// What addresses of the program are called, if the machine has the tool for it.
std::map<std::string, std::string> names_of(const std::set<std::string>& addresses) {
  std::map<std::string, std::string> names;
  if (addresses.empty()) return names;
  std::string command = "addr2line -Cfps -e " + program_path();
  for (const std::string& address : addresses) command += " " + address;
  std::FILE* lines = ::popen((command + " 2>/dev/null").c_str(), "r");
  if (lines == nullptr) return names;
  std::array<char, 8192> line;
  for (const std::string& address : addresses) {
    if (std::fgets(line.data(), line.size(), lines) == nullptr) break;
    const std::string text(line.data());
    const std::size_t at = text.rfind(" at ");
    names[address] = text.substr(0, std::min(text.find('('), std::size_t{100})) +
                     (at == std::string::npos ? "\n" : text.substr(at));
  }
  ::pclose(lines);
  return names;
}

std::vector<std::string> addresses_in(const std::string& stack) {
  std::vector<std::string> addresses;
  for (std::size_t at = stack.find("0x"); at != std::string::npos; at = stack.find("0x", at + 1)) {
    addresses.push_back(stack.substr(at, stack.find(' ', at) - at));
  }
  return addresses;
}

std::vector<faults::PointId> chosen(const Run& run, const Options& options) {
  if (!options.only.empty()) return {std::stoull(options.only, nullptr, 16)};
  std::vector<faults::PointId> points = run.order;
  if (options.sample == 0 || options.sample >= points.size()) return points;
  std::shuffle(points.begin(), points.end(), std::mt19937(options.seed));
  points.resize(options.sample);
  return points;
}

bool is_told(const Outcome& outcome, const Options& options) {
  return !outcome.complaints.empty() || (options.verbose && !outcome.fired);
}

void print(const Run& run, const Scenario& scenario, const Options& options) {
  std::set<std::string> addresses;
  for (const auto& [id, outcome] : run.outcomes) {
    const auto stack = run.points.find(id);
    if (!is_told(outcome, options) || stack == run.points.end()) continue;
    for (std::string& address : addresses_in(stack->second)) addresses.insert(std::move(address));
  }
  const auto names = names_of(addresses);
  for (const auto& [id, outcome] : run.outcomes) {
    if (!is_told(outcome, options)) continue;
    const auto stack = run.points.find(id);
    const std::string text = stack == run.points.end() ? "" : stack->second;
    std::printf("%s %llx: %s%s (%ld ms)\n", scenario.name, static_cast<unsigned long long>(id),
                text.substr(0, text.find(" 0x")).c_str(), outcome.fired ? "" : " was not reached",
                outcome.ms);
    for (const std::string& address : addresses_in(text)) {
      const auto name = names.find(address);
      if (name != names.end()) std::printf("      %s", name->second.c_str());
    }
    for (const std::string& complaint : outcome.complaints) {
      std::printf("   -> %s\n", complaint.c_str());
    }
    for (const std::string& line : outcome.lines) std::printf("   log: %s\n", line.c_str());
  }
}

std::size_t report_of(const Run& run, const Scenario& scenario, const Options& options) {
  std::size_t reached = 0;
  std::size_t failed = run.complaints.size();
  long slowest = 0;
  for (const std::string& complaint : run.complaints) {
    std::printf("%s, without a fault: %s\n", scenario.name, complaint.c_str());
  }
  print(run, scenario, options);
  for (const auto& [id, outcome] : run.outcomes) {
    reached += outcome.fired ? 1 : 0;
    failed += outcome.complaints.empty() ? 0 : 1;
    slowest = std::max(slowest, outcome.ms);
  }
  std::printf("%s: %zu points, %zu tried, %zu reached, %zu failed; the slowest took %ld ms\n",
              scenario.name, run.order.size(), run.outcomes.size(), reached, failed, slowest);
  std::fflush(stdout);
  return failed;
}

std::size_t examine(const Scenario& scenario, const Options& options) {
  Run run;
  Child recorder = start([&](std::FILE* out) { record_points(scenario, out); });
  while (read_from(run, recorder)) {
  }
  reap(run, recorder, false);
  std::vector<faults::PointId> points = chosen(run, options);
  for (int tries = 0; tries < kTries && !points.empty(); ++tries) {
    watch(run, scenario, points, options.jobs);
    std::erase_if(points, [&](faults::PointId id) { return run.outcomes[id].fired; });
  }
  return report_of(run, scenario, options);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "-v") {
      options.verbose = true;
      continue;
    }
    if (i + 1 == argc) usage();
    const std::string value = argv[++i];
    if (name == "--scenario") {
      options.scenario = value;
    } else if (name == "--point") {
      options.only = value;
    } else if (name == "--sample") {
      options.sample = std::stoul(value);
    } else if (name == "--seed") {
      options.seed = static_cast<unsigned>(std::stoul(value));
    } else if (name == "--jobs") {
      options.jobs = std::stoul(value);
    } else {
      usage();
    }
  }
  return options;
}

}  // namespace
}  // namespace moolink::injection

int main(int argc, char** argv) {
  using namespace moolink::injection;
  const Options options = parse(argc, argv);
  std::size_t failed = 0;
  bool any = false;
  for (const Scenario& scenario : scenarios()) {
    if (!options.scenario.empty() && options.scenario != scenario.name) continue;
    any = true;
    failed += examine(scenario, options);
  }
  if (!any) usage();
  return failed == 0 ? 0 : 1;
}
