#include "transport/verbs/connection.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/barrier.h"
#include "transport/verbs/address.h"

namespace moolink::transport::verbs {
namespace {

constexpr int kPreference = 10;  // above tcp, below shared memory
constexpr std::size_t kChunk = std::size_t{256} << 10;
constexpr std::size_t kStrangerFrame = std::size_t{16} << 10;  // many times a greeting
constexpr std::uint32_t kCredits = PacketWriter::kSlots;
// Including slots for SENDs that need no credit.
constexpr std::size_t kSlotsOfUser = kCredits + PacketWriter::kMostEmpty + 1;
constexpr std::uint32_t kMostCredits = 1024;  // accepted from a peer
// Taken in one poll, so that the lock is not held for long while the peer keeps sending.
constexpr int kPollBudget = 64;
constexpr Duration kLinger = seconds(1);
// Posted requests come back at once, unless the device itself has failed.
constexpr Duration kDrain = milliseconds(200);
constexpr Duration kIdle = seconds(5);  // unused for this long, or twice, memory is returned

// The bytes of one slot, in FrameReceiver's form.
class SlotReader {
 public:
  explicit SlotReader(std::span<const std::byte> bytes) : left_(bytes) {}

  std::size_t read(std::span<std::byte> into) {
    const std::size_t size = std::min(into.size(), left_.size());
    if (size > 0) std::memcpy(into.data(), left_.data(), size);
    return skip(size);
  }
  std::size_t skip(std::size_t most) {
    const std::size_t size = std::min(most, left_.size());
    left_ = left_.subspan(size);
    return size;
  }
  void release() {}

 private:
  std::span<const std::byte> left_;
};

}  // namespace

VerbsConnection::VerbsConnection(Environment& environment, Owner& owner,
                                 std::shared_ptr<Device> device,
                                 std::shared_ptr<Connection> control, std::string dialled)
    : environment_(environment),
      owner_(owner),
      device_(std::move(device)),
      control_(std::move(control)),
      dialled_(std::move(dialled)),
      id_(environment.next_connection_id()),
      peer_address_(from_tcp(control_->peer_address())),
      pairs_(device_, device_->port().queue_pairs, this),
      packets_(*device_, pairs_.first()),
      receiver_(environment, *this),
      grants_(*device_),
      writes_(device_->sources(), pairs_, packets_) {
  traits_.preference = kPreference;
  traits_.grants = true;
  traits_.chunk_bytes = kChunk;
  traits_.binding = control_->traits().binding;
  receiver_.set_max_frame(std::min(environment.limits.max_frame, kStrangerFrame));
  device_->add_user(kSlotsOfUser);
}

VerbsConnection::~VerbsConnection() { device_->remove_user(kSlotsOfUser); }

std::string VerbsConnection::local_address() const { return from_tcp(control_->local_address()); }

// The exception barrier of the connection: false if it has failed.
template <class Work>
bool VerbsConnection::guarded(Work&& work) noexcept {
  return guard(work, [this](const Error& error) { fail(with_peer(error)); });
}

// --- agreeing

void VerbsConnection::start() {
  environment_.loop.add(*this);
  registered_ = true;
  if (!dialled_.empty()) say_endpoint();
}

void VerbsConnection::say_endpoint() {
  Endpoint endpoint = pairs_.endpoint();
  endpoint.credits = kCredits;
  control_->write(wire::make_frame(wire::FrameType::message, endpoint));
  control_->flush();
}

void VerbsConnection::told(const wire::ReceivedFrame& frame) {
  if (state_ == State::closed || state_ == State::closing || failed_) return;
  const auto keep = shared_from_this();
  try {
    if (frame.header.type == wire::FrameType::refuse) {
      const auto refusal = wire::decode_control<wire::Refuse>(frame);
      return fail(make_error(refusal.code, peer_address_ + " refuses: " + refusal.text));
    }
    agree(frame);
  } catch (const Exception& e) {
    if (state_ == State::agreeing) {  // the other side gets the reason
      control_->write(
          wire::make_frame(wire::FrameType::refuse,
                           wire::Refuse{e.error().code, e.error().message, environment_.name}));
      control_->flush();
    }
    fail(with_peer(e.error()));
  }
}

void VerbsConnection::agree(const wire::ReceivedFrame& frame) {
  if (frame.header.type != wire::FrameType::message) {
    throw Exception(ErrorCode::wire, "what it says is not about a queue pair");
  }
  const bool accepted = dialled_.empty();
  if (connected_) {  // the dialler is ready; its bytes may have come before
    if (!accepted) throw Exception(ErrorCode::wire, "it names a second queue pair");
    if (state_ == State::agreeing) open();
    return;
  }
  const auto there = wire::decode_control<Endpoint>(frame);
  if (there.credits == 0) throw Exception(ErrorCode::wire, "it takes nothing");
  pairs_.connect(there);
  packets_.set_credits(std::min(there.credits, kMostCredits));
  connected_ = true;
  if (accepted) return say_endpoint();
  control_->write(wire::make_frame(wire::FrameType::message, Endpoint{}));
  control_->flush();
  open();
}

void VerbsConnection::open() {
  state_ = State::open;
  owner_.opened(*this);
}

void VerbsConnection::establish() {
  if (state_ != State::open || std::exchange(established_, true)) return;
  receiver_.set_max_frame(environment_.limits.max_frame);
  control_->establish();
}

// --- sending

void VerbsConnection::write(wire::Frame frame) {
  if (state_ != State::open || failed_) return;
  guarded([&] { queue_.push(std::move(frame)); });
}

void VerbsConnection::flush() {
  if (state_ != State::open || failed_) return;
  guarded([this] { send_queued(); });
}

bool VerbsConnection::send_queued() {
  if (queue_.empty() || !packets_.ready()) return false;
  const std::size_t before = queue_.bytes();
  queue_.write_to(packets_);
  tell_writable();
  return queue_.bytes() != before;
}

void VerbsConnection::tell_writable() {
  if (state_ != State::open || !queue_.ran_low()) return;
  // Posted: the caller may be the handler itself, in the middle of a batch of writes.
  environment_.loop.post([self = shared_from_this()] {
    if (self->state_ == State::open) self->environment_.handler.writable(*self);
  });
}

void VerbsConnection::give_credits() {
  if (packets_.owed() >= kCredits / 2) packets_.send_empty(false);
}

// --- grants

std::optional<Grant> VerbsConnection::allocate_grant(std::size_t bytes) {
  if (state_ != State::open || failed_) return std::nullopt;
  std::optional<Grant> grant = grants_.allocate(bytes);
  if (grant && !idle_timer_) retire_idle_grants();
  return grant;
}

// Memory of grants unused for a while is returned to the system.
void VerbsConnection::retire_idle_grants() {
  const bool again = grants_.retire_idle();
  idle_timer_.reset();
  if (!again) return;
  idle_timer_ = environment_.loop.at(io::now() + kIdle, [self = shared_from_this()] {
    if (self->state_ == State::open) self->retire_idle_grants();
  });
}

void VerbsConnection::fill_grant(const wire::GrantPlace& place, Buffer bytes) {
  if (state_ != State::open || failed_) return;
  writes_.add(place, std::move(bytes));
  environment_.loop.wake();
}

bool VerbsConnection::reads_device(int /*device*/) const {
  return device_->port().gpudirect && device_->sources().refuses_devices().empty();
}

std::string VerbsConnection::refusal_of(const Buffer& bytes) {
  if (!device_->port().gpudirect) return "MOOLINK_VERBS_GPUDIRECT is not 1";
  Registrations& sources = device_->sources();
  return sources.of(bytes) != nullptr ? std::string() : sources.refuses_devices();
}

bool VerbsConnection::write_grants() {
  bool something = false;
  std::optional<wire::GrantPlace> written;
  while (state_ == State::open && !failed_ && writes_.step(written)) {
    something = true;
    if (!written) continue;
    // The message that reports it to the peer leaves after it, and so arrives after it.
    environment_.handler.grant_filled(*this, *std::exchange(written, std::nullopt));
  }
  return something;
}

// --- receiving

bool VerbsConnection::poll() {
  if (state_ == State::closed) return false;
  const auto keep = shared_from_this();
  bool something = false;
  guarded([&] {
    something = take_completions();
    if (connected_ && !failed_ && state_ != State::closed) {
      something = write_grants() || something;
      something = send_queued() || something;
      give_credits();
    }
    if (device_->failed()) fail(lost(device_->port().device + " has failed"));
  });
  guarded([this] { leave_if_done(); });
  return something;
}

bool VerbsConnection::take_completions() {
  int left = kPollBudget;
  for (; left > 0; --left) {
    const std::optional<Completion> completion = pairs_.poll();
    if (!completion) break;
    take(*completion);
    if (state_ == State::closed) break;
  }
  return left < kPollBudget;
}

void VerbsConnection::take(const Completion& completion) {
  if (!completion.received) {
    if (completion.pair == 0) packets_.ended(completion.id);
    writes_.ended(completion.pair, completion.id);
  }
  if (completion.error != nullptr) {
    if (completion.received) device_->post_slot(completion.id);
    if (state_ == State::closing) return finish();
    return fail(lost(std::string("the device says: ") + completion.error));
  }
  if (completion.received) take_arrival(completion);
}

void VerbsConnection::take_arrival(const Completion& completion) {
  struct Return {
    Device& device;
    std::uint64_t slot;
    ~Return() { device.post_slot(slot); }
  } const back{*device_, completion.id};
  if (failed_) return;
  if (completion.pair != 0) {
    packets_.took();
    arrivals_.marked();
    return read_held();
  }
  const auto [taken, marks] = Immediate::of(completion.immediate);
  packets_.taken_by_peer(taken);
  if (completion.bytes == 0) return;
  const auto bytes = device_->slot(completion.id).first(std::min(completion.bytes, kSlotBytes));
  if (arrivals_.may_read(marks)) return read(bytes);
  if (arrivals_.held() == kCredits) {
    throw Exception(ErrorCode::wire, "the peer sends without credits");
  }
  arrivals_.hold(marks, bytes);
}

void VerbsConnection::read(std::span<const std::byte> bytes) {
  packets_.took();
  if (state_ == State::agreeing) open();
  if (state_ != State::open || failed_) return;
  SlotReader reader(bytes);
  receiver_.receive(reader, bytes.size());
}

void VerbsConnection::read_held() {
  while (const auto bytes = arrivals_.next()) read(*bytes);
}

bool VerbsConnection::prepare_sleep() {
  if (state_ == State::closed) return true;
  if (connected_ && !failed_) {
    if (!queue_.empty() && packets_.ready()) return false;
    if (state_ == State::open && writes_.ready()) return false;
  }
  return pairs_.arm();
}

// --- the end

void VerbsConnection::control_ended(const Error& error) {
  if (state_ == State::closed) return;
  const auto keep = shared_from_this();
  if (state_ == State::closing) return finish();
  // The peer sends no more, so this ends; a peer that still sends is cut off.
  for (int left = 64; left > 0 && !failed_ && state_ != State::closed && poll(); --left) {
  }
  fail(with_peer(error));
}

void VerbsConnection::close() {
  if (state_ != State::open || failed_) return;
  state_ = State::closing;
  receiver_.stop();
  grants_.revoke();
  writes_.clear_waiting();
  const auto begin = [this] {
    linger();
    send_queued();
  };
  guard(begin, [this](const Error&) { finish(); });
  environment_.loop.wake();  // the rest from there
}

// Queued frames leave while the peer takes them.
void VerbsConnection::linger() {
  timer_ = environment_.loop.at(io::now() + kLinger,
                                [self = shared_from_this(), before = queue_.bytes()] {
                                  if (self->queue_.bytes() >= before) return self->finish();
                                  self->guarded([&] { self->linger(); });
                                });
}

// For one that fails or is being closed: whether the device has nothing of it any more.
void VerbsConnection::leave_if_done() {
  if (state_ == State::closed) return;
  if (failed_) {
    if (pairs_.idle()) finish();
    return;
  }
  if (state_ != State::closing || !queue_.empty()) return;
  if (packets_.has_silent() && !packets_.send_empty(true)) return;
  if (pairs_.idle()) finish();
}

void VerbsConnection::fail(Error error) noexcept {
  if (state_ == State::closed || failed_) return;
  failed_ = true;
  failure_ = std::move(error);
  receiver_.stop();
  // From here on the peer's writes are not taken and this side's do not leave; all requests of the
  // device have come back before the handler hears of the end.
  pairs_.stop();
  grants_.revoke();
  control_->close();
  environment_.loop.cancel(timer_);
  const auto drain = [this] {
    timer_ =
        environment_.loop.at(io::now() + kDrain, [self = shared_from_this()] { self->finish(); });
  };
  guard(drain, [this](const Error&) { finish(); });
  environment_.loop.wake();
}

void VerbsConnection::finish() noexcept {
  if (state_ == State::closed || finishing_) return;
  finishing_ = true;
  // Only the loop reports it to the handler.
  const auto post = [this] {
    environment_.loop.post([self = shared_from_this()] { self->end(); });
  };
  // If even that fails: the session notices the silence, and so does the peer.
  guard(post, [this](const Error&) { drop(); });
}

void VerbsConnection::end() {
  if (state_ == State::closed) return;
  const State was = state_;
  drop();
  control_->close();
  owner_.ended(*this);
  if (!failed_) return;
  if (was == State::agreeing) return owner_.not_opened(*this, failure_);
  if (was == State::open) environment_.handler.closed(*this, failure_, false);
}

void VerbsConnection::drop() {
  if (state_ == State::closed) return;
  state_ = State::closed;
  receiver_.stop();
  if (registered_) environment_.loop.remove(*this);
  environment_.loop.cancel(timer_);
  if (idle_timer_) environment_.loop.cancel(*std::exchange(idle_timer_, std::nullopt));
  grants_.revoke();
  pairs_.destroy();
  writes_.clear();
  queue_.clear();
}

Error VerbsConnection::lost(const std::string& why) const {
  return with_peer(make_error(ErrorCode::peer_lost, why));
}

Error VerbsConnection::with_peer(const Error& error) const {
  return make_error(error.code, "connection with " + peer_address_ + " closed: " + error.message);
}

}  // namespace moolink::transport::verbs
