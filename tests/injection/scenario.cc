#include "scenario.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace moolink::injection {
namespace {

constexpr const char* kCauses[] = {
    "memory", "bad_alloc",     "Too many open files", "No space left", "No buffer", "not permitted",
    "in use", "Cannot assign", "does not have",       "unavailable",   "was lost",
};

bool names_cause(std::string_view message) {
  return std::any_of(std::begin(kCauses), std::end(kCauses), [&](const char* cause) {
    return message.find(cause) != std::string_view::npos;
  });
}

}  // namespace

void Report::complain(std::string what) {
  const std::lock_guard guard(mutex_);
  complaints_.push_back(std::move(what));
}

void Report::log(std::string_view line) {
  const std::lock_guard guard(mutex_);
  lines_.emplace_back(line);
}

std::vector<std::string> Report::complaints() const {
  const std::lock_guard guard(mutex_);
  return complaints_;
}

std::vector<std::string> Report::lines() const {
  const std::lock_guard guard(mutex_);
  return lines_;
}

void check_error(Report& report, const char* what, const Error& error) {
  if (!faults::fired()) {
    report.complain(std::string(what) + " failed without a fault: " + error.message);
  } else if (!names_cause(error.message)) {
    report.complain(std::string(what) + ": the error does not name its cause: " + error.message);
  }
}

bool attempt(Report& report, const char* what, const std::function<void()>& part) {
  for (int tried = 0; tried < 2; ++tried) {
    const bool fired_before = faults::fired();
    try {
      faults::inside(part);
      return true;
    } catch (const std::exception& e) {
      if (fired_before || tried > 0) {
        report.complain(std::string(what) + " threw without a fault of its own: " + e.what());
        return false;
      }
      check_error(report, what, make_error(ErrorCode::error, e.what()));
    }
  }
  return false;
}

Process::Process(Report& reports, const std::string& name, std::vector<wire::PathKind> paths)
    : report(reports) {
  attempt(report, "a context", [&] {
    runtime::ContextOptions options;
    options.workers = 2;
    options.log = [&sink = report](LogLevel, std::string_view line) {
      const faults::Shield shield;
      sink.log(line);
    };
    context = runtime::Context::create(std::move(options));
  });
  attempt(report, "a peer", [&] {
    runtime::RpcOptions options;
    options.name = name;
    options.transports = paths;
    peer = runtime::RpcPeer::create(context, std::move(options));
  });
}

Process::~Process() {
  if (peer) attempt(report, "close()", [&] { peer->close(); });
  if (context) attempt(report, "stop()", [&] { context->stop(); });
  faults::inside([&] {
    peer.reset();
    context.reset();
  });
}

wire::Payload payload_of(std::uint64_t number, std::size_t bytes) {
  HeapAllocator heap;
  const MutableBuffer body = heap.allocate(sizeof number);
  std::memcpy(body.data(), &number, sizeof number);
  wire::Payload payload{body, {}};
  if (bytes > 0) {
    const MutableBuffer part = heap.allocate(bytes);
    std::memset(part.data(), static_cast<int>(number % 251), bytes);
    payload.parts.push_back(part);
  }
  return payload;
}

bool is_payload_of(const wire::Payload& payload, std::uint64_t number, std::size_t bytes) {
  std::uint64_t found = 0;
  if (payload.body.size() != sizeof found) return false;
  std::memcpy(&found, payload.body.data(), sizeof found);
  if (found != number || payload.parts.size() != (bytes > 0 ? 1 : 0)) return false;
  if (bytes == 0) return true;
  const Buffer& part = payload.parts.front();
  const auto expected = static_cast<std::byte>(number % 251);
  return part.size() == bytes &&
         std::all_of(part.data(), part.data() + bytes, [&](std::byte b) { return b == expected; });
}

}  // namespace moolink::injection
