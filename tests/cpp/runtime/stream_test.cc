#include "runtime/engine/stream.h"

#include <memory>

#include "check.h"
#include "runtime/engine/context.h"

namespace moolink::runtime {
namespace stream_test {

TEST("a stream that ends while it is given credit does not destroy what runs") {
  const auto context = Context::create({});
  Stream stream(context, 1);
  {
    const Engine::Lock lock = context->lock();
    auto held = std::make_shared<int>(0);
    stream.on_room([&stream, held = std::move(held)](std::uint64_t) {
      const std::weak_ptr<int> watched = held;
      stream.complete(make_error(ErrorCode::peer_lost, "the session has ended"));
      CHECK(!watched.expired());
    });
    stream.add({});
  }
  CHECK(stream.take().has_value());
  CHECK(stream.ended());
  context->stop();
}

}  // namespace stream_test
}  // namespace moolink::runtime
