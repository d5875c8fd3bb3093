#pragma once

#include <functional>
#include <list>
#include <string>

#include "base/descriptor.h"
#include "base/error.h"
#include "io/loop.h"

namespace moolink::runtime {

// Tells another process of the same user how things stand here: whoever connects to the abstract
// Unix socket moolink-dump-<uid>-<pid>-<number> is sent a text, and nothing is read from it. It
// is served by whoever polls the loop, so it works while Python computes, hangs or holds the GIL.
// All with the engine's lock held.
class DumpServer {
 public:
  DumpServer(io::Loop& loop, std::function<std::string()> describe);

  // Says what is wrong if the socket cannot be made: no reason to do without moolink.
  Error open();
  void close();
  // In a forked child: the socket is the parent's.
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
  bool send_some(Reader& reader);  // false: there is nothing more to do for it
  void drop(std::list<Reader>::iterator reader);

  io::Loop& loop_;
  std::function<std::string()> describe_;
  Descriptor socket_;
  io::Loop::WatchId watch_ = 0;
  std::list<Reader> readers_;
};

}  // namespace moolink::runtime
