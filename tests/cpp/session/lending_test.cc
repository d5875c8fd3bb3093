// Loans, a frame at a time: what an honest pair says, and what a session does not believe.

#include <cstring>
#include <memory>

#include "check.h"
#include "session/pair.h"

namespace moolink::session::testing {
namespace lending_test {

constexpr std::size_t kBytes = 100'000;

wire::PathTraits lending_path() {
  wire::PathTraits traits;
  traits.loans = true;
  return traits;
}

// A pair whose runtime maps what is lent.
struct Lending {
  Lending() {
    a.session.attach(now, 1, wire::PathKind::shm, lending_path(), false, a.hello);
    b.session.attach(now, 1, wire::PathKind::shm, lending_path(), true, b.hello);
    exchange();
  }

  void exchange() {
    for (bool moved = true; moved;) {
      moved = carry(a, b);
      moved = carry(b, a) || moved;
    }
  }

  bool carry(Side& from, Side& to) {
    answer(from);
    const bool any = !from.out.empty();
    for (; !from.out.empty(); from.out.pop_front()) {
      to.session.received(now, 1, as_received(from.out.front()));
      answer(to);
    }
    return any;
  }

  // Collects the actions, as Side does, and answers those about loans.
  void answer(Side& side) {
    std::vector<Action> actions;
    for (side.session.drain(actions); !actions.empty(); side.session.drain(actions)) {
      for (Action& action : actions) {
        if (auto* pass = std::get_if<PassSegments>(&action)) {
          passed = *pass;
          side.session.segments_passed(now, 1, pass->seq, can_pass);
        } else if (auto* map = std::get_if<MapLoan>(&action)) {
          mapped.push_back(*map);
          side.session.loan_mapped(now, 1, map->seq, map->part, memory, mapping_error);
        } else if (auto* write = std::get_if<Write>(&action)) {
          side.out.push_back(std::move(write->frame));
        } else if (auto* delivered = std::get_if<Deliver>(&action)) {
          side.delivered.push_back(std::move(*delivered));
        } else if (auto* lost = std::get_if<Lost>(&action)) {
          side.lost.push_back(std::move(*lost));
        }
      }
    }
  }

  // Lends `memory`, which lies at 4096 in the segment; the body is small.
  void lend() {
    OutgoingMessage message;
    message.kind = 1;
    message.payload.body = bytes_of(10);
    message.payload.parts = {bytes_of(5), Buffer(lenders, memory.data(), memory.size())};
    message.payload.lent = {{1, segment, 4096, false, out}};
    lenders.reset();
    CHECK(a.session.send(now, std::move(message)));
  }

  HeapAllocator allocator;
  Time now{seconds(100)};
  Side a{{1, 1}, {2, 2}, allocator, {}};
  Side b{{2, 2}, {1, 1}, allocator, {}};
  Buffer memory = bytes_of(kBytes);
  std::shared_ptr<int> lenders = std::make_shared<int>();
  std::weak_ptr<int> watch = lenders;
  std::shared_ptr<std::atomic<bool>> out = std::make_shared<std::atomic<bool>>(false);
  std::uint64_t segment = 7;
  bool can_pass = true;
  Error mapping_error;
  PassSegments passed;
  std::vector<MapLoan> mapped;
};

TEST("a loan is mapped, outlives the acknowledgement, and ends with its return") {
  Lending pair;
  pair.lend();
  pair.exchange();
  CHECK_EQ(pair.passed.segments.size(), 1u);
  CHECK_EQ(pair.mapped.size(), 1u);
  const MapLoan map = pair.mapped.at(0);
  CHECK(map.place.segment == 7 && map.place.offset == 4096 && map.place.bytes == kBytes);
  CHECK_EQ(pair.b.delivered.size(), 1u);
  const wire::Payload& payload = pair.b.delivered.at(0).payload;
  CHECK(payload.parts.at(1).data() == pair.memory.data());
  CHECK(payload.find_lent(0) == nullptr && payload.find_lent(1) != nullptr);
  CHECK(!payload.find_lent(1)->copied);
  pair.now += milliseconds(25);
  pair.b.session.tick(pair.now);
  pair.exchange();
  CHECK(pair.a.session.flushed());
  CHECK(!pair.watch.expired());
  CHECK_EQ(pair.a.session.loans_given(), 1u);
  CHECK_EQ(pair.b.session.loans_held(), 1u);
  CHECK(*pair.out);
  const std::uint64_t loans[] = {map.place.loan};
  pair.b.session.return_loans(pair.now, map.session + 1, loans);  // of an earlier session
  pair.exchange();
  CHECK_EQ(pair.b.session.loans_held(), 1u);
  pair.b.session.return_loans(pair.now, map.session, loans);
  pair.b.session.return_loans(pair.now, map.session, loans);  // nothing is left to return
  pair.exchange();
  CHECK(pair.watch.expired());
  CHECK(!*pair.out);
  CHECK_EQ(pair.a.session.loans_given(), 0u);
  CHECK_EQ(pair.b.session.loans_held(), 0u);
  CHECK(pair.a.lost.empty() && pair.b.lost.empty());
}

TEST("a segment that cannot be passed: the bytes are sent, and released when they are there") {
  Lending pair;
  pair.can_pass = false;
  pair.lend();
  pair.exchange();
  CHECK(pair.mapped.empty());
  pair.a.session.writable(pair.now, 1);
  // Chunks are not carried here; that they were written is all.
  CHECK_EQ(pair.a.session.loans_given(), 0u);
  CHECK(!pair.watch.expired());
}

// No honest lender does so; its peer keeps the bytes, and no loan.
TEST("a part that was lent in one attempt and lies in the frame of the next returns its loan") {
  Lending pair;
  const auto receive = [&](std::uint32_t attempt, wire::PartWhere where,
                           std::vector<Buffer> in_frame) {
    wire::MessageHead head;
    head.kind = 1;
    head.attempt = attempt;
    head.body = {10, 64, wire::PartWhere::inline_, 0};
    head.parts = {{kBytes, 64, where, 1}};
    head.lent = {{0, 7, 4096}};
    in_frame.insert(in_frame.begin(), bytes_of(10));
    wire::Frame frame = wire::make_frame(wire::FrameType::message, head, std::move(in_frame));
    frame.header.seq = 1;
    pair.b.session.received(pair.now, 1, as_received(frame));
    pair.b.collect();
  };
  receive(0, wire::PartWhere::loan, {});
  CHECK_EQ(pair.b.session.loans_held(), 1u);
  receive(1, wire::PartWhere::inline_, {pair.memory});
  CHECK_EQ(pair.b.delivered.size(), 1u);
  const wire::Payload& payload = pair.b.delivered.at(0).payload;
  CHECK(payload.exposed.empty() && payload.find_lent(0)->copied);
  CHECK_EQ(pair.b.session.loans_held(), 0u);
}

TEST("a loan that the system does not map is returned, and the message has the error") {
  Lending pair;
  pair.mapping_error = make_error(ErrorCode::error, "no memory");
  pair.lend();
  pair.exchange();
  CHECK_EQ(pair.b.delivered.size(), 1u);
  CHECK(pair.b.delivered.at(0).error);
  CHECK_EQ(pair.a.session.loans_given(), 0u);
  CHECK_EQ(pair.b.session.loans_held(), 0u);
  CHECK(pair.b.lost.empty());
}

TEST("a loan at a place that there is not ends the session") {
  Lending pair;
  pair.mapping_error = make_error(ErrorCode::wire, "no such place");
  pair.lend();
  pair.exchange();
  CHECK_EQ(pair.b.lost.size(), 1u);
  CHECK(pair.b.delivered.empty());
}

TEST("the end of a session gives every loan back") {
  Lending pair;
  pair.lend();
  pair.exchange();
  CHECK(!pair.watch.expired());
  pair.a.session.end(make_error(ErrorCode::peer_lost, "gone"), false);
  CHECK(pair.watch.expired());  // before anybody is told that it ended
  CHECK(*pair.out);             // the peer may still read it
}

TEST("a captured part that could not be lent is like any other") {
  Lending pair;
  pair.memory = bytes_of(1000);
  pair.segment = wire::kDeviceSegments | 7;
  pair.lend();
  pair.exchange();
  CHECK_EQ(pair.b.delivered.size(), 1u);
  CHECK(pair.b.delivered.at(0).payload.lent.empty());
  CHECK(!*pair.out);
}

TEST("small parts are not lent") {
  Lending pair;
  pair.memory = bytes_of(1000);
  pair.lend();
  pair.exchange();
  CHECK(pair.mapped.empty());
  CHECK_EQ(pair.b.delivered.size(), 1u);
  const wire::LentPart* lent = pair.b.delivered.at(0).payload.find_lent(1);
  CHECK(lent != nullptr && lent->copied);
}

wire::MessageHead a_loan(std::uint64_t loan = 1) {
  wire::MessageHead head;
  head.kind = 1;
  head.body.bytes = 0;
  head.parts.resize(1);
  head.parts[0] = {kBytes, 64, wire::PartWhere::loan, loan};
  head.lent = {{0, 7, 0}};
  return head;
}

wire::Frame message(const wire::MessageHead& head, std::uint64_t seq = 1) {
  wire::Frame frame = wire::make_frame(wire::FrameType::message, head);
  frame.header.seq = seq;
  return frame;
}

void breaks(const char* what, const std::vector<wire::Frame>& frames, bool loans = true) {
  Lending pair;
  if (!loans) {
    pair.b.session.attach(pair.now, 2, wire::PathKind::tcp, {}, false, pair.b.hello);
    pair.a.session.attach(pair.now, 2, wire::PathKind::tcp, {}, true, pair.a.hello);
    std::vector<Action> actions;
    pair.a.session.drain(actions);
    for (Action& action : actions) {
      if (auto* write = std::get_if<Write>(&action)) {
        pair.b.session.received(pair.now, 2, as_received(write->frame));
      }
    }
  }
  for (const wire::Frame& frame : frames) {
    pair.b.session.received(pair.now, loans ? 1 : 2, as_received(frame));
    pair.answer(pair.b);
  }
  const bool ended = pair.b.lost.size() == 1 && pair.b.lost[0].reason.code == ErrorCode::wire;
  if (!ended) check::fail(__FILE__, __LINE__, what);
}

TEST("what no honest lender says ends the session") {
  breaks("a loan without a number", {message(a_loan(0))});
  breaks("a loan given twice", {message(a_loan(1), 1), message(a_loan(1), 2)});
  breaks("a loan over a path without loans", {message(a_loan())}, false);
  wire::MessageHead head = a_loan();
  head.lent[0].part = 1;
  breaks("a part that is none", {message(head)});
  head = a_loan();
  head.lent.push_back(head.lent[0]);
  breaks("a part twice", {message(head)});
  head = a_loan();
  head.lent.clear();
  breaks("a loan of a part that is not lent", {message(head)});
  head = a_loan();
  head.parts[0].bytes = 0;
  breaks("an empty loan", {message(head)});
  head = a_loan();
  head.body = {8, 64, wire::PartWhere::loan, 2};
  breaks("a lent body", {message(head)});
  head.body = {std::uint64_t{1} << 20, 64, wire::PartWhere::grant, 0};
  breaks("a body in a grant", {message(head)});
}

TEST("what no honest borrower says ends the session") {
  const auto returns = [](std::vector<std::uint64_t> loans) {
    const Buffer body = wire::encode(wire::Return{std::move(loans)});
    wire::MessageHead head;
    head.kind = kReturnKind;
    head.body.bytes = body.size();
    wire::Frame frame = wire::make_frame(wire::FrameType::message, head, {body});
    frame.header.seq = 1;
    return frame;
  };
  breaks("a return of nothing that was given", {returns({1})});
  wire::Frame garbage = returns({});
  const MutableBuffer five_of_none = HeapAllocator().allocate(garbage.payload.at(0).size());
  five_of_none.data()[0] = std::byte{5};
  garbage.payload = {five_of_none};
  breaks("a return that is none", {garbage});
}

}  // namespace lending_test
}  // namespace moolink::session::testing
