#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "base/time.h"

namespace moolink {

// One code for each class of Python's exception hierarchy (moolink/errors.py).
enum class ErrorCode : std::uint8_t {
  none = 0,
  error,             // Error
  timeout,           // TimeoutError
  cancelled,         // CancelledError
  peer_lost,         // PeerLost
  no_such_function,  // NoSuchFunction
  remote,            // RemoteError
  group_changed,     // GroupChanged
  queue_full,        // QueueFull
  auth,              // AuthError
  wire,              // WireError
  closed,            // Closed: an object of this process, not a peer
  invalid_argument,  // ValueError
};
inline constexpr std::uint8_t kErrorCodes = 13;

// Whether the peer ran a call that failed.
enum class Ran : std::uint8_t { no = 0, maybe = 1, yes = 2 };

// How a peer was lost.
enum class Down : std::uint8_t {
  dead,         // proven: pidfd, refused reconnect, another instance under its name
  unreachable,  // not heard for evict_after, or the session is lost: the peer itself may live
  closed,       // it said CLOSE
};

// The event, the peer or group concerned, and the remedy; plain data, so that it can travel and be
// simulated.
struct Error {
  ErrorCode code = ErrorCode::none;
  std::string message{};
  std::string peer{};         // the peer's name, if one is concerned
  std::string function{};     // the function or group, if one is concerned
  std::string remote_type{};  // RemoteError: the type of the exception at the peer
  std::string traceback{};    // RemoteError: the peer's formatted traceback
  Ran ran = Ran::no;          // PeerLost, TimeoutError: whether the call was run

  explicit operator bool() const { return code != ErrorCode::none; }

  auto fields() { return std::tie(code, message, peer, function, remote_type, traceback, ran); }
};

inline Error make_error(ErrorCode code, std::string message) {
  return {.code = code, .message = std::move(message)};
}

// Memory that the system has refused for another reason than the lack of it, such as a limit on the
// size of files: MemoryError with that reason.
class NoMemory : public std::bad_alloc {
 public:
  explicit NoMemory(const std::string& why) : why_(std::make_shared<const std::string>(why)) {}
  const char* what() const noexcept override { return why_->c_str(); }

 private:
  std::shared_ptr<const std::string> why_;
};

// Thrown inside the library where a result cannot be returned; bind turns it into Python's.
class Exception : public std::runtime_error {
 public:
  explicit Exception(Error error) : std::runtime_error(error.message), error_(std::move(error)) {}
  Exception(ErrorCode code, std::string message)
      : Exception(make_error(code, std::move(message))) {}

  const Error& error() const { return error_; }

 private:
  Error error_;
};

}  // namespace moolink
