#include "transport/verbs/connection.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/barrier.h"
#include "transport/verbs/address.h"

namespace moolink::transport::verbs {
namespace {

constexpr std::size_t kLowWater = std::size_t{1} << 20;
constexpr std::size_t kHighWater = std::size_t{4} << 20;
constexpr int kPreference = 10;  // above tcp, below shared memory
constexpr std::size_t kChunk = std::size_t{256} << 10;
constexpr std::uint32_t kCredits = PacketWriter::kSlots;
// Including slots for SENDs that need no credit.
constexpr std::size_t kSlotsOfUser = kCredits + PacketWriter::kMostEmpty + 1;
constexpr std::uint32_t kMostCredits = 1024;  // accepted from a peer
// Taken in one poll, so that the lock is not held for long while the peer keeps sending.
constexpr int kPollBudget = 64;
// Posted requests come back at once, unless the device itself has failed.
constexpr Duration kDrain = milliseconds(200);

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

VerbsConnection::VerbsConnection(Environment& environment, ConnectionOwner& owner,
                                 std::shared_ptr<Device> device,
                                 std::shared_ptr<Connection> control, std::string dialled)
    : ConnectionBase(environment, owner, std::move(dialled), kLowWater, kHighWater),
      device_(std::move(device)),
      control_(std::move(control)),
      pairs_(device_, device_->port().queue_pairs, this),
      packets_(*device_, pairs_.first()),
      grants_(*device_),
      writes_(device_->sources(), pairs_, packets_) {
  peer_address_ = from_tcp(control_->peer_address());
  traits_.preference = kPreference;
  traits_.grants = true;
  traits_.chunk_bytes = kChunk;
  traits_.binding = control_->traits().binding;
  device_->add_user(kSlotsOfUser);
}

VerbsConnection::~VerbsConnection() { device_->remove_user(kSlotsOfUser); }

std::string VerbsConnection::local_address() const { return from_tcp(control_->local_address()); }

// --- agreeing

void VerbsConnection::start() {
  polled_ = environment_.loop.add(*this);
  if (!dialled().empty()) say_endpoint();
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
    if (!opened_) {  // the other side gets the reason
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
  const bool accepted = dialled().empty();
  if (connected_) {  // the dialler is ready; its bytes may have come before
    if (!accepted) throw Exception(ErrorCode::wire, "it names a second queue pair");
    if (!opened_) open();
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

// --- sending

void VerbsConnection::send_queued() {
  if (queue_.empty() || !packets_.ready()) return;
  queue_.write_to(packets_);
  tell_writable(*this);
}

void VerbsConnection::give_credits() {
  if (packets_.owed() >= kCredits / 2) packets_.send_empty(false);
}

// --- grants

std::optional<Grant> VerbsConnection::allocate_grant(std::size_t bytes) {
  if (!usable()) return std::nullopt;
  std::optional<Grant> grant = grants_.allocate(bytes);
  if (grant) watch_idle_grants();
  return grant;
}

void VerbsConnection::fill_grant(const wire::GrantPlace& place, Buffer bytes) {
  if (!usable()) return;
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
  while (usable() && writes_.step(written)) {
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
  guarded([&]() MOOLINK_LOCKED {
    something = take_completions();
    if (connected_ && !failed_ && state_ != State::closed) {
      something = write_grants() || something;
      something = send_some() || something;
      give_credits();
    }
    if (device_->failed()) fail(lost(device_->port().device + " has failed"));
  });
  guarded([this]() MOOLINK_LOCKED { leave_if_done(); });
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
  if (!opened_) open();
  if (!usable()) return;
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
  if (!usable()) return;
  state_ = State::closing;
  receiver_.stop();
  grants_.revoke();
  writes_.clear_waiting();
  const auto begin = [this]() MOOLINK_LOCKED {
    linger();
    send_queued();
  };
  guard(begin, [this](const Error&) MOOLINK_LOCKED { finish(); });
  environment_.loop.wake();  // the rest from there
}

// Queued frames leave while the peer takes them.
void VerbsConnection::linger() {
  timer_ = environment_.loop.timer(io::now() + kLinger, [this, self = shared_from_this(),
                                                         before = queue_.bytes()]() MOOLINK_LOCKED {
    if (queue_.bytes() >= before) return finish();
    guarded([this]() MOOLINK_LOCKED { linger(); });
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

void VerbsConnection::fail(Error error, bool /*peer_dead*/) noexcept {
  if (state_ == State::closed || failed_) return;
  failed_ = true;
  failure_ = std::move(error);
  receiver_.stop();
  // From here on the peer's writes are not taken and this side's do not leave; all requests of the
  // device have come back before the handler hears of the end.
  pairs_.stop();
  grants_.revoke();
  control_->close();
  timer_.reset();
  const auto drain = [this]() MOOLINK_LOCKED {
    timer_ = environment_.loop.timer(
        io::now() + kDrain, [this, self = shared_from_this()]() MOOLINK_LOCKED { finish(); });
  };
  guard(drain, [this](const Error&) MOOLINK_LOCKED { finish(); });
  environment_.loop.wake();
}

void VerbsConnection::finish() noexcept {
  if (state_ == State::closed || finishing_) return;
  finishing_ = true;
  post_end(failure_, false);
}

void VerbsConnection::finish_close() {
  control_->close();
  ConnectionBase::finish_close();
}

void VerbsConnection::release() {
  polled_.reset();
  grants_.revoke();
  pairs_.destroy();
  writes_.clear();
}

Error VerbsConnection::lost(const std::string& why) const {
  return with_peer(make_error(ErrorCode::peer_lost, why));
}

}  // namespace moolink::transport::verbs
