// SPDX-License-Identifier: Apache-2.0
// libFuzzer: a server that says and sends what it likes, over time, to a worker loop that has another server, too.
// Operations come, are given up and end meanwhile. It may write where an answer of its own is awaited, and nowhere
// else; what the other server alone sums is right; and when it is lost, every operation is over.
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "core/log.h"
#include "fuzz/fuzz.h"
#include "server/fake_transport.h"
#include "worker/worker_loop.h"

using namespace bps;
using fuzz::Input;
using namespace bps::transport;
using tensor::PushHeader;

namespace {

constexpr std::uint64_t kPiece = 256;
constexpr std::uint32_t kEpoch = 1;
constexpr std::uint32_t kHonest = 0;
constexpr std::uint32_t kLiar = 1;
constexpr std::size_t kMostOperations = 12;
constexpr std::size_t kMostBytes = 4096;  // of one input
constexpr std::byte kInput{1};
constexpr std::byte kSum{7};   // what the honest server answers
constexpr std::byte kLie{99};  // and the other one

struct Server {
  worker::ServerConnection* connection = nullptr;
  server::FakeControl control{Hello{}};
  server::FakeData data{Hello{}};
  std::size_t seen = 0;     // of its pushes
  std::size_t written = 0;  // of which the worker knows that they have left
  std::vector<PushHeader> pushes;
  std::vector<bool> over;  // answered, or given up
};

struct Call {
  std::vector<std::byte> memory;
  bool has_liar;
  std::shared_ptr<worker::Operation> operation;
};

class Job {
 public:
  explicit Job(bool two_phase)
      : two_phase_(two_phase),
        loop_(worker::WorkerLoopOptions{.places = 2,
                                        .scheduling_credit = 8 * kPiece,
                                        .largest_partition = 1 << 16,
                                        .staging_bytes = 1 << 20,
                                        .survives_servers = two_phase},
              reactor_) {
    transport_.by_address = true;
    for (std::uint32_t i = 0; i < 2; ++i) {
      Server& one = servers_[i];
      one.connection = &loop_.add_server(i, i, i == kHonest ? "honest" : "liar", transport_);
      one.control.sink = one.connection;
      one.data.sink = one.connection;
      one.data.room = ~std::size_t{0};
      loop_.open(*one.connection, &one.control, {&one.data});
      tensor::Credits credits;
      for (std::uint32_t slot = 0; slot < 8; ++slot) {
        credits.slots.push_back({tensor::SlotNumber(slot), 0, 0, kPiece + kMaxHeader});
      }
      say(i, encode(credits, kEpoch));
    }
  }

  // A partition for each server in turn, or all for the honest one.
  void call(std::uint32_t pieces, bool has_liar) {
    if (calls_.size() == kMostOperations) return;
    Call& made = calls_.emplace_back(Call{std::vector(kPiece * pieces, kInput), has_liar, nullptr});
    auto tensor = std::make_shared<worker::Tensor>(tensor::Partitioning(made.memory.size(), 1, kPiece),
                                                   tensor::Partitioning(made.memory.size(), 1, kPiece));
    tensor->name = "tensor";
    tensor->id = static_cast<std::uint32_t>(calls_.size());
    tensor->group = group_;
    tensor->dtype = Dtype::kUint8;
    tensor->bytes = made.memory.size();
    tensor->plans.whole.resize(2);
    for (std::uint32_t i = 0; i < pieces; ++i) tensor->plans.whole[has_liar ? (i + 1) % 2 : kHonest].push_back({i});
    worker::Request request;
    request.survives_servers = two_phase_;
    request.input = request.output = made.memory.data();
    request.input_allocation = request.output_allocation = {made.memory, calls_.size()};
    made.operation = std::make_shared<worker::Operation>(tensor, request, 0, calls_.size(), 1, 2);
    loop_.submit(made.operation, true);
  }
  void give_up() {
    loop_.abort_operations([](const worker::Operation&) { return true; }, ErrorCode::kTimeout, "too late", "");
  }
  void say(std::uint32_t server, std::span<const std::byte> message) {
    Server& from = servers_[server];
    if (!from.connection->is_closed()) from.connection->on_message(from.control, message);
  }
  // One of the pushes that the liar was sent, or what it makes up.
  PushHeader push_of(std::uint32_t index) {
    const auto& all = servers_[kLiar].pushes;
    return all.empty() ? PushHeader{} : all[index % all.size()];
  }
  // As tcp takes an answer: only to where it is allowed.
  void answer(std::uint32_t server, const RemoteSpan& where, std::uint32_t immediate, std::uint64_t landed,
              std::byte value) {
    Server& from = servers_[server];
    if (from.connection->is_closed()) return;
    if (where.length > 0) {
      if (from.connection->allows_write(from.data, where, immediate) == 0) return;
      auto* const at = reinterpret_cast<std::byte*>(where.address);
      if (server == kLiar) expect_own(at, where.length);
      std::memset(at, static_cast<int>(value), std::min(landed, where.length));
    }
    from.connection->on_write(from.data, immediate, landed);
  }
  void cut_off(std::uint32_t immediate, std::uint64_t bytes) {
    Server& from = servers_[kLiar];
    if (!from.connection->is_closed()) from.connection->on_cut_off(from.data, immediate, bytes);
  }
  // What the worker and the transport do by themselves; and the honest server, if it has its turn.
  void go_on(bool honest) {
    (void)reactor_.loop().turn(Duration::zero());
    (void)loop_.step();
    for (Server& one : servers_) {
      for (; one.seen < one.data.headers.size(); ++one.seen) {
        PushHeader header{};
        fuzz::expect(one.data.headers[one.seen].size() == sizeof header);
        std::memcpy(&header, one.data.headers[one.seen].data(), sizeof header);
        one.pushes.push_back(header);
        one.over.push_back(false);
      }
      for (; one.written < one.data.writes.size(); ++one.written) {
        if (!one.connection->is_closed()) one.connection->on_written(one.data, one.data.writes[one.written].token);
      }
    }
    if (honest) behave();
  }
  void end() {
    for (int i = 0; i < 200 && !is_idle_but_for_liar(); ++i) go_on(true);
    for (const Call& one : calls_) {
      if (one.has_liar) continue;
      fuzz::expect(one.operation->is_done());
      if (!one.operation->failure()) fuzz::expect(is_all(one.memory, kSum));
    }
    if (!servers_[kLiar].connection->is_closed()) loop_.lose_server(kLiar, "the liar is lost");
    for (int i = 0; i < 200 && !loop_.is_idle(); ++i) go_on(true);
    for (const Call& one : calls_) fuzz::expect(one.operation->is_done());
    fuzz::expect(loop_.is_idle());
  }

 private:
  static bool is_all(std::span<const std::byte> bytes, std::byte value) {
    return std::ranges::all_of(bytes, [value](std::byte one) { return one == value; });
  }
  bool is_idle_but_for_liar() const {
    return std::ranges::all_of(calls_, [](const Call& one) { return one.has_liar || one.operation->is_done(); });
  }
  // In the memory of an operation that is not over, in a partition of the liar's; or in a buffer.
  void expect_own(const std::byte* at, std::uint64_t length) {
    for (const Call& one : calls_) {
      const std::byte* const begin = one.memory.data();
      if (at + length <= begin || at >= begin + one.memory.size()) continue;
      fuzz::expect(one.has_liar && at >= begin && at + length <= begin + one.memory.size());
      const auto first = static_cast<std::uint64_t>(at - begin);
      fuzz::expect(first / kPiece % 2 == 0 && length <= kPiece && first % kPiece + length <= kPiece);
      fuzz::expect(!one.operation->is_done());
    }
  }
  void behave() {
    Server& me = servers_[kHonest];
    for (const tensor::ControlMessage& message : std::exchange(me.control.messages, {})) {
      const auto* cancel = std::get_if<tensor::Cancel>(&message);
      if (cancel == nullptr) continue;
      tensor::Cancelled reply;
      for (const tensor::CancelledPartition& one : cancel->partitions) {
        bool is_answered = false;
        for (std::size_t i = 0; i < me.pushes.size(); ++i) {
          if (me.pushes[i].immediate != one.immediate) continue;
          is_answered |= me.over[i];
          if (!me.over[i]) grant(me, i);
          me.over[i] = true;
        }
        (is_answered ? reply.answered : reply.aborted).push_back(one.immediate);
      }
      say(kHonest, encode(reply, kEpoch));
    }
    for (std::size_t i = 0; i < me.pushes.size(); ++i) {
      if (me.over[i]) continue;
      me.over[i] = true;
      const PushHeader& push = me.pushes[i];
      answer(kHonest, {push.answer_key, push.answer_address, push.length}, push.immediate, push.length, kSum);
      if (two_phase_) say(kHonest, encode(tensor::Committed{{push.immediate}}, kEpoch));
      grant(me, i);
    }
  }
  // The bytes of this push have been consumed.
  void grant(const Server& me, std::size_t push) {
    tensor::Credits credits;
    credits.slots.push_back({tensor::SlotNumber(me.data.writes[push].immediate), 0, 0, kPiece + kMaxHeader});
    say(kHonest, encode(credits, kEpoch));
  }

  const bool two_phase_;
  Reactor reactor_{"fuzz", Spin{}};  // never started: the fuzzer is its thread
  server::FakeTransport transport_;
  std::shared_ptr<const van::Group> group_ = std::make_shared<const van::Group>(van::Group{0, {0}});
  std::array<Server, 2> servers_;
  std::deque<Call> calls_;
  worker::WorkerLoop loop_;
};

// A control message about pushes of its own, of which some bytes may be changed.
Bytes made_up(Job& job, Input& input) {
  const std::uint32_t one = job.push_of(input.take<std::uint8_t>()).immediate;
  const std::uint32_t other = input.take<std::uint8_t>() % 2 == 0 ? job.push_of(input.take<std::uint8_t>()).immediate
                                                                  : input.take<std::uint32_t>();
  const auto slot = [&] {
    return tensor::SlotCredit{tensor::SlotNumber(input.take<std::uint8_t>() % 12U), 0, 0, kPiece + kMaxHeader};
  };
  Bytes message;
  switch (input.take<std::uint8_t>() % 11) {
    case 0: message = encode(tensor::Cancelled{{one}, {}, {}, {}}, kEpoch); break;
    case 1: message = encode(tensor::Cancelled{{}, {one, other}, {}, {0}}, kEpoch); break;
    case 2: message = encode(tensor::Cancelled{{}, {}, {one, other}, {}}, kEpoch); break;
    case 3: message = encode(tensor::Committed{{one, other}}, kEpoch); break;
    case 4: message = encode(tensor::PushFailed{one, ErrorCode::kMismatch, "what", "hint"}, kEpoch); break;
    case 5: message = encode(tensor::Credits{{slot(), slot()}, {}}, kEpoch); break;
    case 6: message = encode(tensor::PathBroken{input.take<std::uint8_t>()}, kEpoch); break;
    case 7: message = encode(tensor::PathLost{input.take<std::uint8_t>(), {one}}, kEpoch); break;
    case 8: message = encode(tensor::RoundFailed{0, 1, 0, 0, ErrorCode::kTimeout, "what", "hint"}, kEpoch); break;
    case 9: message = encode(tensor::HostHasLeft{0, 1, 0, 0, ErrorCode::kPeerLost, "what", "hint"}, kEpoch); break;
    default: message = encode(tensor::Echo{input.take<std::uint16_t>()}, kEpoch);
  }
  for (auto changes = input.take<std::uint8_t>() % 16; changes > 8; --changes) {
    const auto at = input.take<std::uint8_t>() % message.size();
    message[at] = input.take<std::byte>();
  }
  return message;
}

void step(Job& job, Input& input) {
  switch (input.take<std::uint8_t>() % 10) {
    case 0:
    case 1: return job.say(kLiar, made_up(job, input));
    case 2: {  // an answer, right or nearly so
      const PushHeader push = job.push_of(input.take<std::uint8_t>());
      RemoteSpan where{push.answer_key, push.answer_address, push.length};
      std::uint64_t landed = push.length;
      std::uint32_t immediate = push.immediate;
      const auto change = input.take<std::uint8_t>();
      if (change % 8 == 1) where.address += input.take<std::uint8_t>();
      if (change % 8 == 2) where.length = input.take<std::uint16_t>();
      if (change % 8 == 3) landed = input.take<std::uint16_t>();
      if (change % 8 == 4) immediate ^= input.take<std::uint32_t>();
      if (change % 8 == 5) where = {};
      return job.answer(kLiar, where, immediate, landed, kLie);
    }
    case 3: return job.say(kLiar, input.take_bytes(input.take<std::uint8_t>()));
    case 4: return job.cut_off(job.push_of(input.take<std::uint8_t>()).immediate, input.take<std::uint16_t>());
    case 5: return job.call(1U + input.take<std::uint8_t>() % 6U, true);
    case 6: return job.call(1U + input.take<std::uint8_t>() % 6U, false);
    case 7: return input.take<std::uint8_t>() % 4 == 0 ? job.give_up() : job.go_on(false);
    default: return job.go_on(input.take<std::uint8_t>() % 2 == 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool quiet = [] {
    set_log(LogLevel::kError, "fuzz");
    return true;
  }();
  if (!quiet || size < 2 || size > kMostBytes) return 0;
  Input input(std::as_bytes(std::span(data, size)));
  Job job((input.take<std::uint8_t>() & 1) != 0);
  job.call(4, true);
  job.call(4, false);
  job.go_on(false);
  while (!input.empty()) step(job, input);
  job.end();
  return 0;
}
