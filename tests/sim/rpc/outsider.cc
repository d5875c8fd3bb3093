#include "rpc/outsider.h"

#include <utility>

#include "common/program.h"
#include "rpc/world.h"

namespace moolink::sim {

namespace {

constexpr int kAnybody = -1;

void fill(Random& random, wire::Hello& greeting) {
  greeting.proof.resize(wire::kProofBytes);
  for (std::byte& byte : greeting.proof) byte = static_cast<std::byte>(random.next());
}

}  // namespace

// A whole greeting, to that acceptor if there is one.
const Overheard* Outsider::some(int acceptor) const {
  std::vector<const Overheard*> whole;
  for (const Overheard& one : world_->overheard) {
    if (one.welcome && (acceptor == kAnybody || one.acceptor == acceptor)) whole.push_back(&one);
  }
  return whole.empty() ? nullptr : whole[world_->simulation.random.below(whole.size())];
}

// Its own, or in another's name, with that one's keys.
wire::Hello Outsider::forged() const {
  Random& random = world_->simulation.random;
  wire::Hello greeting;
  greeting.instance = Uid::random(random);
  greeting.name = "outsider";
  greeting.max_frame = Limits{}.max_frame;
  if (const Overheard* one = some(kAnybody)) {
    greeting.keys = one->hello->keys;
    if (random.chance(1, 2)) {
      greeting.instance = one->hello->instance;
      greeting.name = one->hello->name;
    }
  }
  return greeting;
}

void Outsider::attack(Process& target) {
  Random& random = world_->simulation.random;
  const Path& path = random.chance(1, 2) ? world_->settings.shm : world_->settings.tcp;
  const auto [ours, theirs] = world_->network.connect(*this, target, path);
  target.opened(theirs, path, "");
  Attack& attack = attacks_[ours];
  attack.dialled = true;
  ++coverage["attacks"];
  const Overheard* one = some(target.number);
  wire::Hello hello = forged();
  switch (random.below(one == nullptr ? 4 : 6)) {
    case 0:  // its proof is sent back to it
      attack.welcome = hello;
      attack.reflects = true;
      break;
    case 1:  // any proof, and a session that cannot be
      attack.welcome = hello;
      fill(random, *attack.welcome);
      attack.welcome->session = 1 + random.below(1000);
      break;
    case 2:  // no proof at all
      attack.welcome = hello;
      break;
    case 3:  // neither greeting nor proof
      world_->network.write(ours, wire::make_frame(wire::FrameType::close, wire::Close{}));
      return;
    case 4:  // what another has said to this very process
      hello = *one->hello;
      attack.welcome = one->welcome;
      break;
    default:  // what this process, or another, has said as the acceptor
      hello = *one->answer;
      attack.welcome = one->answer;
      break;
  }
  if (&path == &world_->settings.shm) target.claimed_by_outsider(hello.name);
  write(ours, wire::FrameType::hello, hello);
}

void Outsider::write(ConnectionId connection, wire::FrameType type, const wire::Hello& greeting) {
  world_->network.write(connection, wire::make_frame(type, greeting));
}

void Outsider::received(ConnectionId connection, const wire::ReceivedFrame& frame) {
  const auto found = attacks_.find(connection);
  if (found == attacks_.end()) return;
  const wire::FrameType type = frame.header.type;
  require(type == wire::FrameType::hello || type == wire::FrameType::refuse,
          std::string("an outsider was let in: it hears ") + wire::kFrameTypes[type]);
  if (type == wire::FrameType::refuse) {
    ++coverage["attacks refused"];
    return;
  }
  const auto theirs = wire::decode_control<wire::Hello>(frame);
  Attack attack = std::move(found->second);
  found->second = {};
  if (attack.dialled) {
    if (!attack.welcome) return;
    if (attack.reflects) {
      attack.welcome->keys = theirs.keys;
      attack.welcome->proof = theirs.proof;
      attack.welcome->proof.resize(wire::kProofBytes);
    }
    write(connection, wire::FrameType::welcome, *attack.welcome);
    return;
  }
  // The acceptor: what the one that was meant has said before, what it hears itself, or anything.
  Random& random = world_->simulation.random;
  const Overheard* one = some(kAnybody);
  if (random.chance(1, 2)) {
    const auto name = random.below(static_cast<std::uint64_t>(world_->settings.peers));
    const wire::Refuse refusal{ErrorCode::auth, "it holds another key",
                               world_->process(static_cast<int>(name)).name};
    world_->network.write(connection, wire::make_frame(wire::FrameType::refuse, refusal));
    ++coverage["dials refused in another's name"];
    return;
  }
  wire::Hello answer = one != nullptr && random.chance(1, 2) ? *one->answer : theirs;
  if (answer.instance == theirs.instance) answer.instance = Uid::random(random);
  if (random.chance(1, 2)) fill(random, answer);
  write(connection, wire::FrameType::hello, answer);
}

}  // namespace moolink::sim
