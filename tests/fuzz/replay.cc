// Runs a fuzz target without libFuzzer: over its seeds and over all files of the folders named, or
// writes the seeds into one (--seeds FOLDER).

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "target.h"

namespace {

namespace fs = std::filesystem;

void run(const moolink::fuzz::Bytes& bytes) {
  moolink::fuzz::run({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
}

int write_seeds(const fs::path& folder) {
  fs::create_directories(folder);
  int number = 0;
  for (const auto& seed : moolink::fuzz::seeds()) {
    std::ofstream file(folder / ("seed-" + std::to_string(number++)), std::ios::binary);
    file.write(reinterpret_cast<const char*>(seed.data()),
               static_cast<std::streamsize>(seed.size()));
  }
  return 0;
}

std::vector<fs::path> files_of(const std::vector<std::string>& places) {
  std::vector<fs::path> files;
  for (const fs::path place : places) {
    if (fs::is_regular_file(place)) files.push_back(place);
    if (!fs::is_directory(place)) continue;
    for (const auto& entry : fs::directory_iterator(place)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 2 && arguments[0] == "--seeds") return write_seeds(arguments[1]);
  const auto seeds = moolink::fuzz::seeds();
  for (const auto& seed : seeds) run(seed);
  const auto files = files_of(arguments);
  for (const fs::path& path : files) {
    // Said before, for a run that ends the program.
    std::printf("%s\n", path.c_str());
    std::fflush(stdout);
    std::ifstream file(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const auto* data = reinterpret_cast<const std::byte*>(text.data());
    run({data, data + text.size()});
  }
  std::printf("%zu seeds and %zu files passed\n", seeds.size(), files.size());
  return seeds.empty() ? 1 : 0;
}
