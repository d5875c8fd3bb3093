// What a group of many members costs:
//   sim_members [--members N] [--elements N] [--rounds N] [--deaths N] [--seeds N]
// prints one line of JSON; exits with 1 if the group does not get on, with 2 on wrong usage.
// `elements` are of 8 bytes. `deaths` members die at once. Messages and bytes are per member, CPU
// is in seconds.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>

#include "members/crowd.h"

namespace moolink::sim {
namespace {

struct Options {
  int members = 50;
  int elements = 16;
  int rounds = 5;
  int deaths = 5;
  int seeds = 0;
};

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view flag = argv[i];
    int* value = flag == "--members"    ? &options.members
                 : flag == "--elements" ? &options.elements
                 : flag == "--rounds"   ? &options.rounds
                 : flag == "--deaths"   ? &options.deaths
                 : flag == "--seeds"    ? &options.seeds
                                        : nullptr;
    if (value == nullptr) return false;
    *value = std::atoi(argv[i + 1]);
  }
  return argc % 2 == 1 && options.members > 2 && options.elements > 0 && options.rounds > 0 &&
         options.deaths > 0 && options.deaths + 3 <= options.members;
}

std::string text(const char* name, const Cost& cost, int members, int times = 1) {
  const double each = static_cast<double>(members) * times;
  char line[512];
  std::snprintf(line, sizeof line,
                "\"%s\": {\"messages\": %.3f, \"bytes\": %.0f, \"most_sent\": %.1f, "
                "\"broker_sent\": %.1f, \"cpu\": %.4f, \"cpu_broker\": %.4f, "
                "\"cpu_busiest\": %.4f, \"ms\": %.1f, \"by_service\": {",
                name, static_cast<double>(cost.messages) / each,
                static_cast<double>(cost.bytes) / each, static_cast<double>(cost.most_sent) / times,
                static_cast<double>(cost.broker_sent) / times, cost.cpu / times,
                cost.broker_cpu / times, cost.most_cpu / times,
                std::chrono::duration<double, std::milli>(cost.took).count() / times);
  std::string result = line;
  bool first = true;
  for (const auto& [service, messages] : cost.by_service) {
    std::snprintf(line, sizeof line, "%s\"%s\": %.3f", first ? "" : ", ", service.c_str(),
                  static_cast<double>(messages) / each);
    result += line;
    first = false;
  }
  return result + "}}";
}

void run(const Options& options) {
  const int n = options.members;
  Crowd crowd(n, static_cast<std::size_t>(options.elements),
              static_cast<std::uint64_t>(options.seeds));
  std::string result = "{\"members\": " + std::to_string(n) +
                       ", \"bucket_bytes\": " + std::to_string(8 * options.elements);
  result += ", " + text("form", crowd.form(), n);
  result += ", " + text("round", crowd.rounds(options.rounds), n, options.rounds);
  result += ", " + text("idle_second", crowd.idle(seconds(1)), n);
  result += ", " + text("death", crowd.death(), n);
  crowd.idle(milliseconds(500));
  result += ", " + text("join", crowd.join(), n);
  crowd.idle(milliseconds(500));
  result += ", " + text("deaths", crowd.deaths(options.deaths), n);
  std::printf("%s}\n", result.c_str());
}

}  // namespace
}  // namespace moolink::sim

int main(int argc, char** argv) {
  moolink::sim::Options options;
  if (!moolink::sim::parse(argc, argv, options)) {
    std::fprintf(stderr,
                 "usage: %s [--members N] [--elements N] [--rounds N] [--deaths N] [--seeds N]\n",
                 argv[0]);
    return 2;
  }
  try {
    moolink::sim::run(options);
  } catch (const std::exception& broken) {
    std::fprintf(stderr, "%s\n", broken.what());
    return 1;
  }
}
