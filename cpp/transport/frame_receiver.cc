#include "transport/frame_receiver.h"

#include <span>
#include <utility>

#include "base/error.h"

namespace moolink::transport {

FrameReceiver::FrameReceiver(Environment& environment, Connection& connection, OwnFrames* own)
    : environment_(environment), connection_(connection), own_(own), limits_(environment.limits) {
  expect(Stage::header, scratch_.data(), wire::kHeaderBytes);
}

void FrameReceiver::stop() {
  stopped_ = true;
  target_ = nullptr;  // the handler's, which dropped this connection
}

void FrameReceiver::expect(Stage stage, std::byte* target, std::size_t size) {
  stage_ = stage;
  target_ = target;
  left_ = size;
}

void FrameReceiver::finish_stage() {
  const Stage done = stage_;
  if (done == Stage::header) return finish_header();
  if (done == Stage::chunk_head) return finish_chunk_head();
  // The next stage is set before the handler is called, because the handler may stop this receiver.
  expect(Stage::header, scratch_.data(), wire::kHeaderBytes);
  if (done == Stage::frame) {
    wire::ReceivedFrame frame{header_, std::exchange(frame_, {})};
    if (own_ != nullptr && own_->takes(frame)) return;
    environment_.handler.received(connection_, std::move(frame));
  } else {
    environment_.handler.chunk_received(connection_, chunk_);
  }
}

void FrameReceiver::finish_header() {
  header_ = wire::decode_header(
      std::span<const std::byte, wire::kHeaderBytes>(scratch_.data(), wire::kHeaderBytes), limits_);
  if (header_.type != wire::FrameType::chunk) {
    frame_ = environment_.allocator.allocate(header_.length);
    return expect(Stage::frame, frame_.data(), header_.length);
  }
  if (header_.control > kLongestChunkHead) {
    throw Exception(ErrorCode::wire, "the control of a chunk is too long");
  }
  expect(Stage::chunk_head, scratch_.data(), header_.control);
}

void FrameReceiver::finish_chunk_head() {
  chunk_ =
      wire::decode<wire::ChunkHead>(std::span<const std::byte>(scratch_.data(), header_.control));
  const bool apart = header_.flags != 0 && own_ != nullptr;
  if (header_.length - header_.control != (apart ? 0 : chunk_.bytes)) {
    throw Exception(ErrorCode::wire, "a chunk's length differs from its frame's");
  }
  const std::span<std::byte> target = environment_.handler.chunk_target(connection_, chunk_);
  if (!target.empty() && target.size() != chunk_.bytes) {
    throw Exception(ErrorCode::error, "a chunk's target has another size than the chunk");
  }
  if (apart) {
    expect(Stage::header, scratch_.data(), wire::kHeaderBytes);
    if (!stopped_) own_->chunk_apart(header_.flags, chunk_, target);
    return;
  }
  expect(Stage::chunk, stopped_ || target.empty() ? nullptr : target.data(),
         static_cast<std::size_t>(chunk_.bytes));
}

}  // namespace moolink::transport
