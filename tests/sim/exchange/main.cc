#include "common/program.h"
#include "exchange/world.h"

int main(int argc, char** argv) {
  return moolink::sim::run_program(argc, argv, "exchange", [](std::uint64_t seed, bool trace) {
    moolink::sim::ExchangeWorld world(seed, trace);
    world.run();
    return world.hash();
  });
}
