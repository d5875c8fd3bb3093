#include "common/program.h"
#include "replay/world.h"

int main(int argc, char** argv) {
  return moolink::sim::run_program(argc, argv, "replay", [](std::uint64_t seed, bool trace) {
    moolink::sim::ReplayWorld world(seed, trace);
    world.run();
    return world.hash();
  });
}
