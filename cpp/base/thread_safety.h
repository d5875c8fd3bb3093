#pragma once

// Clang checks at compile time (-Wthread-safety, in `make lint`) that the engine's lock is held
// where it is needed; other compilers ignore this.

#ifdef __clang__
#define MOOLINK_THREAD_SAFETY(...) __attribute__((__VA_ARGS__))
#else
#define MOOLINK_THREAD_SAFETY(...)
#endif

namespace moolink {

// "This thread holds the lock of the object's engine": one capability for all engines, because code
// refers to the same engine by many expressions.
class MOOLINK_THREAD_SAFETY(capability("lock")) EngineLockHeld {
 public:
  // For code where the analysis cannot see that the lock is held.
  void assume() const MOOLINK_THREAD_SAFETY(assert_capability(this)) {}
};
inline constexpr EngineLockHeld engine_lock;

}  // namespace moolink

// A variable that may be used, and a function or lambda that may be called, only with the engine's
// lock held. A lambda that becomes a std::function needs it too: the analysis cannot see its calls.
#define MOOLINK_GUARDED MOOLINK_THREAD_SAFETY(guarded_by(moolink::engine_lock))
#define MOOLINK_LOCKED MOOLINK_THREAD_SAFETY(requires_capability(moolink::engine_lock))
// A function that takes the lock: the caller must not hold it.
#define MOOLINK_UNLOCKED MOOLINK_THREAD_SAFETY(locks_excluded(moolink::engine_lock))
// A function that takes the lock and leaves it held for its caller.
#define MOOLINK_TAKES_LOCK MOOLINK_THREAD_SAFETY(acquire_capability(moolink::engine_lock))
// A function whose body is not analysed.
#define MOOLINK_UNCHECKED MOOLINK_THREAD_SAFETY(no_thread_safety_analysis)
