#pragma once

#include <functional>
#include <list>
#include <string>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/thread_safety.h"
#include "io/loop.h"

namespace moolink::runtime {

// Describes this process's state to another process of the same user: a client that connects to the
// abstract Unix socket moolink-dump-<uid>-<pid>-<number> gets a text, and nothing is read from it.
// The thread that polls the loop serves it, so it works while Python computes, hangs or holds the
// GIL.
class DumpServer {
 public:
  DumpServer(io::Loop& loop, std::function<std::string()> describe);

  // Returns the error if the socket cannot be made; moolink works without it.
  Error open() MOOLINK_LOCKED;
  void close() MOOLINK_LOCKED;
  // In a forked child: the socket belongs to the parent.
  void abandon() noexcept;

 private:
  struct Reader {
    Descriptor socket;
    std::string text;
    std::size_t sent = 0;
    io::Loop::Watch watch{};
  };

  void accept_all() MOOLINK_LOCKED;
  void serve(Descriptor socket) MOOLINK_LOCKED;
  bool send_some(Reader& reader) MOOLINK_LOCKED;  // false: this reader is finished

  io::Loop& loop_;
  std::function<std::string()> describe_;
  Descriptor socket_;
  io::Loop::Watch watch_;
  std::list<Reader> readers_;
};

}  // namespace moolink::runtime
