#pragma once

#include <exception>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/thread_safety.h"

namespace moolink {

// The exception being handled, as an error that names its cause. For a catch clause.
inline Error current_error() {
  try {
    throw;
  } catch (const Exception& e) {
    return e.error();
  } catch (const NoMemory& e) {
    return make_error(ErrorCode::error, e.what());
  } catch (const std::bad_alloc&) {
    return make_error(ErrorCode::error, "out of memory");
  } catch (const std::exception& e) {
    return make_error(ErrorCode::error, e.what());
  } catch (...) {
    return make_error(ErrorCode::error, "an exception of an unknown type");
  }
}

// The C++ library allocates a thread's exception state with its first exception, and ends the
// process if there is no memory for it. A thread that calls this has the state in advance.
inline void prepare_for_exceptions() noexcept {
  // The function is declared pure: without a use of its result the compiler omits the call.
  [[maybe_unused]] const volatile int used = std::uncaught_exceptions();
}

// The exception barrier: an exception ends its own operation, and nothing else. Runs `work`; an
// exception is passed to `end` as an Error, which ends the operation, connection or peer that
// `work` was for. False if `work` threw. Exceptions of `end` itself are dropped: with no memory
// left even for an error, a time limit or the silence of a peer ends the work.
template <class Work, class End>
bool guard(Work&& work, End&& end) noexcept MOOLINK_UNCHECKED {
  try {
    std::forward<Work>(work)();
    return true;
  } catch (...) {
    try {
      std::forward<End>(end)(current_error());
    } catch (...) {
      return false;
    }
  }
  return false;
}

}  // namespace moolink
