#include "common/program.h"
#include "shared_pipeline/world.h"

int main(int argc, char** argv) {
  return moolink::sim::run_program(argc, argv, "shared_pipeline",
                                   [](std::uint64_t seed, bool trace) {
                                     moolink::sim::SharedPipelineWorld world(seed, trace);
                                     world.run();
                                     return world.hash();
                                   });
}
