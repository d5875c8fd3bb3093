#pragma once

#include <functional>
#include <list>
#include <string>

#include "base/descriptor.h"
#include "base/error.h"
#include "io/loop.h"

namespace moolink::runtime {

// Describes this process's state to another process of the same user: a client that connects to the
// abstract Unix socket moolink-dump-<uid>-<pid>-<number> gets a text, and nothing is read from it.
// The thread that polls the loop serves it, so it works while Python computes, hangs or holds the
// GIL. All with the engine's lock held.
class DumpServer {
 public:
  DumpServer(io::Loop& loop, std::function<std::string()> describe);

  // Returns the error if the socket cannot be made; moolink works without it.
  Error open();
  void close();
  // In a forked child: the socket belongs to the parent.
  void abandon() noexcept;

 private:
  struct Reader {
    Descriptor socket;
    io::Loop::WatchId watch = 0;
    std::string text;
    std::size_t sent = 0;
  };

  void accept_all();
  void serve(Descriptor socket);
  bool send_some(Reader& reader);  // false: this reader is finished
  void drop(std::list<Reader>::iterator reader);

  io::Loop& loop_;
  std::function<std::string()> describe_;
  Descriptor socket_;
  io::Loop::WatchId watch_ = 0;
  std::list<Reader> readers_;
};

}  // namespace moolink::runtime
