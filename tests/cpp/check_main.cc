#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "check.h"

namespace moolink::check {
namespace {

struct Test {
  std::string name;
  std::function<void()> body;
};

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

int failures_in_test = 0;

bool run(const Test& test) {
  failures_in_test = 0;
  try {
    test.body();
  } catch (const std::exception& e) {
    fail(test.name.c_str(), 0, (std::string("unexpected exception: ") + e.what()).c_str());
  }
  if (failures_in_test > 0) std::printf("FAILED  %s\n", test.name.c_str());
  return failures_in_test == 0;
}

}  // namespace

void add_test(std::string name, std::function<void()> body) {
  tests().push_back({std::move(name), std::move(body)});
}

void fail(const char* file, int line, const char* what) {
  ++failures_in_test;
  std::printf("%s:%d: %s\n", file, line, what);
}

}  // namespace moolink::check

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  int passed = 0;
  int failed = 0;
  for (const auto& test : moolink::check::tests()) {
    if (test.name.find(filter) == std::string::npos) continue;
    (moolink::check::run(test) ? passed : failed) += 1;
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
