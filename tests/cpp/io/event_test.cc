#include "io/event.h"

#include "check.h"
#include "edges.h"

namespace moolink::io {
namespace {

using check::Edges;

TEST("event: each time is a new edge though nobody clears it") {
  const Event event;
  Edges edges(event.descriptor());
  CHECK(!edges.next());
  for (int i = 0; i < 3; ++i) {
    event.set();
    CHECK(edges.next());
    CHECK(!edges.next());
  }
}

TEST("event: one before the watch is not lost, one that was cleared is") {
  const Event event;
  event.set();
  CHECK(Edges(event.descriptor()).next());
  event.clear();
  CHECK(!Edges(event.descriptor()).next());
  event.clear();  // does not wait for the next one
}

}  // namespace
}  // namespace moolink::io
