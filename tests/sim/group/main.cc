#include "common/program.h"
#include "group/scenarios.h"

int main(int argc, char** argv) {
  return moolink::sim::run_program(argc, argv, "group", moolink::sim::run_seed);
}
