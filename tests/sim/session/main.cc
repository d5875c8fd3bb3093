#include "common/program.h"
#include "session/world.h"

int main(int argc, char** argv) {
  return moolink::sim::run_program(argc, argv, "session", [](std::uint64_t seed, bool trace) {
    return moolink::sim::World(seed, trace).run();
  });
}
