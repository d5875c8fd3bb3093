#include "transport/tcp/openssl.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace moolink::transport::tcp {
namespace {

constexpr const char* kLibrary = "libssl.so.3";
constexpr unsigned long kOldest = 0x30000000;     // 3.0
constexpr unsigned long kTooNew = 0x30700000;     // 3.7: not tried
constexpr std::uint64_t kInitNoAtExit = 0x80000;  // threads may be using it when the process ends

template <class Function>
bool find(void* library, const char* symbol, Function& function, std::string& missing) {
  void* found = dlsym(library, symbol);
  if (found == nullptr && missing.empty()) missing = symbol;
  function = reinterpret_cast<Function>(found);
  return found != nullptr;
}

std::string file_of(const OpenSsl& functions) {
  Dl_info info{};
  const auto* address = reinterpret_cast<const void*>(functions.context_new);
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "in this process";
  return info.dli_fname;
}

// Takes the functions from a loaded library; `why` if it is unusable.
bool take(void* library, bool loaded_here, OpenSslFound& into, std::string& why) {
  OpenSsl table;
  std::string missing;
#define MOOLINK_OPENSSL_FIND(result, member, symbol, arguments) \
  find(library, #symbol, table.member, missing);
  MOOLINK_OPENSSL_FUNCTIONS(MOOLINK_OPENSSL_FIND)
#undef MOOLINK_OPENSSL_FIND
  if (table.version_number == nullptr || table.version_text == nullptr) {
    why = "it is no OpenSSL 3";
    return false;
  }
  const std::string version = table.version_text(0);
  const unsigned long number = table.version_number();
  if (number < kOldest || number >= kTooNew) {
    why = version + " is not one of 3.0 to 3.6";
    return false;
  }
  if (!missing.empty()) {
    why = version + " has no " + missing;
    return false;
  }
  if (table.initialise(loaded_here ? kInitNoAtExit : 0, nullptr) != 1) {
    why = version + " cannot be initialised";
    return false;
  }
  into.functions = new OpenSsl(table);  // for ever, like the library
  into.version = version;
  into.where = file_of(table);
  return true;
}

// For a Python with its own libraries: <prefix>/bin/python, <prefix>/lib.
std::string beside_interpreter() {
  std::array<char, PATH_MAX> path{};
  const ssize_t size = readlink("/proc/self/exe", path.data(), path.size() - 1);
  if (size <= 0) return {};
  const std::string program(path.data(), static_cast<std::size_t>(size));
  const std::size_t slash = program.rfind('/');
  if (slash == std::string::npos) return {};
  std::string file = program.substr(0, slash) + "/../lib/" + kLibrary;
  return access(file.c_str(), R_OK) == 0 ? file : std::string();
}

void note(std::string& reasons, const std::string& where, const std::string& why) {
  if (!reasons.empty()) reasons += "; ";
  reasons += where + ": " + why;
}

}  // namespace

OpenSslFound look_for_openssl(const char* named) {
  OpenSslFound found;
  std::string why;
  if (named != nullptr && std::strcmp(named, "none") == 0) {
    found.reason = "MOOLINK_OPENSSL is 'none'";
    return found;
  }
  const auto load = [&](const char* file, int flags) {
    void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL | flags);
    if (library == nullptr) {
      const char* text = dlerror();
      if (flags == 0) note(found.reason, file, text == nullptr ? "cannot be loaded" : text);
      return false;
    }
    if (take(library, flags == 0, found, why)) return true;
    note(found.reason, file, why);
    return false;
  };
  if (named != nullptr && *named != '\0') {
    load(named, 0);
    return found;
  }
  if (load(kLibrary, RTLD_NOLOAD)) return found;
  // Linked into the program, or loaded under another name.
  if (dlsym(RTLD_DEFAULT, "SSL_CTX_new") != nullptr) {
    if (take(RTLD_DEFAULT, false, found, why)) return found;
    note(found.reason, "in this process", why);
  }
  const std::string beside = beside_interpreter();
  if (!beside.empty() && load(beside.c_str(), 0)) return found;
  load(kLibrary, 0);
  return found;
}

const OpenSslFound& find_openssl() {
  static const OpenSslFound found = look_for_openssl(std::getenv("MOOLINK_OPENSSL"));
  return found;
}

}  // namespace moolink::transport::tcp
