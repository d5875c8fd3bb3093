#pragma once

// A test harness of one page: TEST registers, CHECK reports and goes on, main() is in
// check_main.cc.

#include <functional>
#include <sstream>
#include <string>
#include <utility>

#include "base/error.h"

namespace moolink::check {

void add_test(std::string name, std::function<void()> body);
void fail(const char* file, int line, const char* what);

struct Registration {
  Registration(std::string name, std::function<void()> body) {
    add_test(std::move(name), std::move(body));
  }
};

template <class A, class B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << text;
  if constexpr (requires { what << a << b; }) what << ": " << a << " != " << b;
  fail(file, line, what.str().c_str());
}

}  // namespace moolink::check

// Whether ThreadSanitizer is on, and whether tests may define operator new: clang's runtime for it
// has one that cannot be replaced.
#ifdef __SANITIZE_THREAD__
#define MOOLINK_TEST_THREAD_SANITIZER 1
#define MOOLINK_TEST_OWN_NEW 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MOOLINK_TEST_THREAD_SANITIZER 1
#define MOOLINK_TEST_OWN_NEW 0
#endif
#endif
#ifndef MOOLINK_TEST_THREAD_SANITIZER
#define MOOLINK_TEST_THREAD_SANITIZER 0
#define MOOLINK_TEST_OWN_NEW 1
#endif

#define MOOLINK_JOIN_(a, b) a##b
#define MOOLINK_JOIN(a, b) MOOLINK_JOIN_(a, b)

// By a counter: several files of tests may be compiled as one.
#define TEST(name) MOOLINK_TEST(name, __COUNTER__)
#define MOOLINK_TEST(name, number)                                                      \
  static void MOOLINK_JOIN(test_body_, number)();                                       \
  static const ::moolink::check::Registration MOOLINK_JOIN(test_registration_, number)( \
      name, MOOLINK_JOIN(test_body_, number));                                          \
  static void MOOLINK_JOIN(test_body_, number)()

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) ::moolink::check::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(a, b) ::moolink::check::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)

#define CHECK_THROWS(expression, expected_code)                                            \
  do {                                                                                     \
    bool thrown = false;                                                                   \
    try {                                                                                  \
      (void)(expression);                                                                  \
    } catch (const ::moolink::Exception& e) {                                              \
      thrown = true;                                                                       \
      CHECK(e.error().code == (expected_code));                                            \
    }                                                                                      \
    if (!thrown) ::moolink::check::fail(__FILE__, __LINE__, #expression " threw nothing"); \
  } while (false)
