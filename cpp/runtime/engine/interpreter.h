#pragma once

namespace moolink::runtime {

// What the runtime needs from the language whose handlers it runs; bind implements it with the GIL.
// The reactor never calls it.
class Interpreter {
 public:
  virtual ~Interpreter() = default;
  // On a worker's thread, around a batch of tasks.
  virtual void enter() = 0;
  virtual void leave() = 0;
  // The thread, which has entered before, ends.
  virtual void thread_ends() = 0;
  // Between enter and leave: a task threw an exception.
  virtual void failed(const char* what) = 0;
};

// For handlers in C++, which need nothing.
class NoInterpreter final : public Interpreter {
 public:
  void enter() override {}
  void leave() override {}
  void thread_ends() override {}
  void failed(const char*) override {}
};

}  // namespace moolink::runtime
