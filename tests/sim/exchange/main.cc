#include <string>
#include <vector>

#include "common/program.h"
#include "exchange/world.h"

int main(int argc, char** argv) {
  const std::vector<std::string> mutants = {
      "encode_again",               // compresses anew what is passed on
      "finish_without_division",    // a mean without its divisor
      "forget_residual",            // compresses without what was lost before
      "keep_uncompressed",          // the owner's result is not what the others get
      "reduce_without_own",         // passes on what came instead of the sum
      "residual_of_another_chain",  // all chains share the first one's
  };
  return moolink::sim::run_program(argc, argv, mutants, [](std::uint64_t seed, bool trace) {
    moolink::sim::ExchangeWorld world(seed, trace);
    world.run();
    return world.hash();
  });
}
