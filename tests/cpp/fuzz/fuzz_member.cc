// SPDX-License-Identifier: Apache-2.0
// libFuzzer: a member of the job that sends what it likes: well-framed control messages, pushes with any header, and
// writes to any place, over tcp and as postings of shared memory, to a server and to the relay of its host. It does
// so over many rounds of the others, one at a time and in floods, until it has used up what the server keeps for it.
// The others never notice: each of their rounds has the right sum, is delivered once, and nothing else of theirs is
// written.
//
// The server loop, its sessions and tcp's data endpoints are the real ones. Its control endpoints only record what is
// sent, and direct access to a worker's memory is checked as shm checks it.
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "compress/label.h"
#include "core/event_loop.h"
#include "core/log.h"
#include "fuzz/fuzz.h"
#include "server/server_loop.h"
#include "transport/listener.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/tcp_transport.h"

using namespace bps;
using fuzz::Input;
using namespace bps::transport;
using tensor::PushHeader;

namespace {

constexpr std::uint64_t kPartition = 16 * 1024;  // payload of the others' round, and the largest that is allowed
constexpr std::size_t kFloats = kPartition / sizeof(float);
constexpr std::uint32_t kMembers = 3;
constexpr std::uint32_t kBad = 2;     // the rank that has gone bad; the first group has all ranks,
constexpr std::uint32_t kOthers = 1;  // the second one all but this one
constexpr std::uint32_t kAnswer = 77;
constexpr std::uint32_t kHostAnswer = 78;  // of what rank 1 pushes for its host
constexpr std::uint32_t kEpoch = 1;
constexpr std::uint32_t kStored = 12;                                     // the tensor whose weights the server keeps
constexpr std::size_t kMostBytes = 4096;                                  // of one input
constexpr std::uint32_t kMostRounds = 8;                                  // of the others, in one input
constexpr server::RoundTable::Limits kTable{.rounds = 64, .words = 256};  // a flood of one input is more

struct RecordingControl final : ControlEndpoint {
  explicit RecordingControl(const Hello& hello) : ControlEndpoint(hello) {}
  Status send(std::span<const std::byte> message) override {
    const auto decoded = tensor::decode(message, kEpoch);
    fuzz::expect(decoded.has_value());
    if (const auto* credits = std::get_if<tensor::Credits>(&*decoded)) {
      slots.insert(slots.end(), credits->slots.begin(), credits->slots.end());
    }
    return Status::kOk;
  }
  void sever() override {}
  std::vector<tensor::SlotCredit> slots;
};

// Shared memory: the member's tensor is its region 1, and nothing else can be reached.
struct DirectData final : DataEndpoint, DirectAccess {
  explicit DirectData(const Hello& hello) : DataEndpoint(hello, this), tensor(kFloats) {}
  std::size_t write(std::span<const WriteOp> ops) override {
    for (const WriteOp& op : ops) answers.push_back(op.immediate);
    return ops.size();
  }
  bool peer_reaches(const Region&) const override { return true; }
  bool peer_maps(const Region&) const override { return true; }
  std::size_t post(std::span<const Posting>) override { return 0; }
  std::byte* map(const RemoteSpan& span) override {
    const auto bytes = std::as_writable_bytes(std::span(tensor));
    const bool inside =
        span.key == 1 && span.address <= bytes.size() && span.length <= bytes.size() - span.address && mapped;
    return inside ? bytes.data() + span.address : nullptr;
  }
  Status get(const RemoteSpan& span, std::byte* into) override {
    const std::byte* from = map(span);
    if (from != nullptr) std::memcpy(into, from, span.length);
    return from != nullptr ? Status::kOk : Status::kProtocol;
  }
  Status put(const RemoteSpan& span, const std::byte* from) override {
    std::byte* into = map(span);
    if (into != nullptr) std::memcpy(into, from, span.length);
    return into != nullptr ? Status::kOk : Status::kProtocol;
  }
  bool is_fenced() override { return true; }
  bool can_fence() const override { return true; }
  void fence() override {}
  void sever() override {}

  std::vector<float> tensor;
  std::vector<std::uint32_t> answers;
  bool mapped = true;
};

// Data over tcp, or direct; control messages recorded.
struct MixedTransport final : Transport {
  MixedTransport(EventLoop& loop, Counters& counters, bool is_direct)
      : tcp(loop, kJob, counters, {}), direct(is_direct) {}
  Kind kind() const override { return Kind::kTcp; }
  RegionPtr register_memory(std::span<std::byte> bytes) override { return tcp.register_memory(bytes); }
  std::unique_ptr<ControlEndpoint> connect_control(const ConnectRequest&) override { return nullptr; }
  std::unique_ptr<DataEndpoint> connect_data(const ConnectRequest&) override { return nullptr; }
  ControlEndpoint* attach(std::unique_ptr<ControlEndpoint>, ControlSink&) override { return nullptr; }
  DataEndpoint* attach(std::unique_ptr<DataEndpoint>, DataSink&) override { return nullptr; }
  ControlEndpoint* accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) override {
    controls.push_back(std::make_unique<RecordingControl>(incoming->hello));
    controls.back()->sink = &sink;
    return controls.back().get();
  }
  DataEndpoint* accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) override {
    if (!direct) return tcp.accept_data(std::move(incoming), sink);
    ends.push_back(std::make_unique<DirectData>(incoming->hello));
    ends.back()->sink = &sink;
    return ends.back().get();
  }
  void close(Endpoint*) override {}
  int poll() override { return tcp.poll(); }
  bool arm() override { return true; }
  void disarm() override {}

  static inline const Credentials kJob = Credentials::from("job", "secret");
  tcp::TcpTransport tcp;
  const bool direct;
  std::vector<std::unique_ptr<RecordingControl>> controls;
  std::vector<std::unique_ptr<DirectData>> ends;
};

// The way from the relay to the servers, which answer with what they get.
struct LoopedNetwork final : tensor::ContributionSender {
  std::uint64_t largest() const override { return kPartition; }
  void contribute(std::uint32_t contribution, const PushHeader& header, std::int32_t, std::uint32_t) override {
    fuzz::expect(header.length <= kPartition && header.position == 1);
    pending.push_back(contribution);
    types[contribution] = header.dtype;
    if ((header.flags & tensor::kTwoPhase) != 0) two_phase.insert(contribution);
  }
  void cancel(std::uint32_t contribution, const Error&) override {
    if (std::erase(pending, contribution) > 0) cancelled.push_back(contribution);
  }
  void note_landed(std::uint32_t contribution) override {
    fuzz::expect(sums.contains(contribution));
    landed.push_back(contribution);
  }
  void refuse(const PushHeader&, std::uint32_t, const Error&) override {}
  bool answer() {
    bool any = !cancelled.empty() || !landed.empty();
    for (const std::uint32_t contribution : std::exchange(landed, {})) {
      const auto sum = sums.extract(contribution);
      two_phase.erase(contribution);
      if (!sum.empty()) source->deliver(contribution, sum.mapped().data());
    }
    for (const std::uint32_t contribution : std::exchange(cancelled, {})) {
      source->fail(contribution, Error(ErrorCode::kTimeout, "given up", ""), {});
    }
    for (const std::uint32_t contribution : std::exchange(pending, {})) {
      std::vector<std::byte> sum(kPartition);
      if (source->sum(contribution, types[contribution], sum.data()) == Status::kOk) {
        any = true;
        if (!two_phase.contains(contribution)) {
          source->deliver(contribution, sum.data());
          continue;
        }
        std::vector<std::byte>& kept = sums[contribution] = std::move(sum);
        source->propose(contribution, kept.data());
      } else {
        pending.push_back(contribution);  // until the loss of a rank is known
      }
    }
    return any;
  }
  tensor::ContributionSource* source = nullptr;
  std::vector<std::uint32_t> pending;
  std::vector<std::uint32_t> cancelled;
  std::map<std::uint32_t, Dtype> types;
  std::set<std::uint32_t> two_phase;
  std::map<std::uint32_t, std::vector<std::byte>> sums;  // that have landed
  std::vector<std::uint32_t> landed;                     // on all ranks of the host
};

class Job {
 public:
  // With `hosts`, ranks 1 and 2 share a host with the server, which is their relay.
  Job(EventLoop& loop, bool direct, bool hosts) : loop_(loop), transport_(loop, counters_, direct) {
    van::Membership members;
    members.workers = kMembers;
    members.servers = 1;
    for (std::uint32_t rank = 0; rank < kMembers; ++rank) {
      van::Node node;
      node.id = rank + 1;
      node.worker_rank = static_cast<std::int32_t>(rank);
      node.worker_loops = 1;
      node.server_rank = rank == 1 ? 0 : -1;
      node.host_key = hosts && rank == 0 ? "a" : "b";
      node.sums_on_host = hosts;
      members.nodes.push_back(node);
    }
    server_ = std::make_unique<server::ServerLoop>(
        server::ServerLoopOptions{
            .window = 2, .slot_memory = kMembers << 18, .largest_partition = kPartition, .table = kTable, .node = 2},
        members, std::vector<Transport*>{&transport_}, counters_);
    network_.source = &server_->relay_by(network_);
    server_->add_group(van::Group{0, {0, 1, 2}});
    server_->add_group(van::Group{kOthers, {0, 1}});
    for (std::uint32_t rank = 0; rank < kMembers; ++rank) {
      Hello hello{.node = rank + 1, .plane = Plane::kControl};
      server_->accept(std::make_unique<IncomingConnection>(hello), &transport_);
      hello.plane = Plane::kData;
      server_->accept(direct ? std::make_unique<IncomingConnection>(hello) : connect(hello), &transport_);
      say(rank, encode(tensor::Attach{kPartition, true, 1}, kEpoch));
    }
    settle();
    if (direct && !hosts) store();
  }

  std::uint32_t slots_of(std::uint32_t rank) { return static_cast<std::uint32_t>(control(rank).slots.size()); }
  tensor::SlotCredit slot_of(std::uint32_t rank, std::uint32_t index) {
    const auto& slots = control(rank).slots;
    return slots.empty() ? tensor::SlotCredit{} : slots[index % slots.size()];
  }
  void say(std::uint32_t rank, std::span<const std::byte> message) {
    control(rank).sink->on_message(control(rank), message);
  }
  void write(std::uint32_t rank, const tcp::TcpFrame& frame, std::span<const std::byte> bytes) {
    if (transport_.direct)
      return transport_.ends[rank]->sink->on_write(*transport_.ends[rank], frame.immediate, frame.length);
    // One system call each: the bytes are repeated up to the length that the frame names; of longer ones there is only
    // the frame.
    message_.clear();
    message_.reserve(3 * kPartition);
    append(codec::bytes_of(frame));
    const std::uint64_t length = !bytes.empty() && frame.length <= 2 * kPartition ? frame.length : 0;
    for (std::uint64_t at = 0; at < length; at += bytes.size()) {
      append(bytes.first(std::min<std::uint64_t>(length - at, bytes.size())));
    }
    send(rank, message_);
  }
  void describe(std::uint32_t rank, std::span<const std::byte> header, const RemoteSpan& span) {
    if (transport_.direct) transport_.ends[rank]->sink->on_posting(*transport_.ends[rank], header, span);
  }
  // What the member's memory begins with.
  void fill(std::uint32_t rank, std::span<const std::byte> bytes) {
    if (transport_.direct) std::ranges::copy(bytes, reinterpret_cast<std::byte*>(transport_.ends[rank]->tensor.data()));
  }
  void settle() {
    for (int i = 0; i < 3; ++i) {
      int found = transport_.direct ? 0 : loop_.turn(Duration::zero());  // only sockets are watched
      found += transport_.poll();
      if (!server_->step() && !network_.answer() && found == 0) return;
    }
  }

  PushHeader header(std::uint32_t rank, std::uint32_t group) const {
    PushHeader made{};
    made.version = kProtocolVersion;
    made.dtype = Dtype::kFloat32;
    made.flags = tensor::kHasPayload | tensor::kIsPush | tensor::kIsPull | tensor::kWantsData;
    made.position = static_cast<std::uint16_t>(rank);
    made.group = group;
    made.tensor = 11;
    made.round = round_;
    made.immediate = kAnswer;
    made.epoch = kEpoch;
    made.length = kPartition;
    made.answer_key = 1;
    return made;
  }
  // A push as an honest member does it: into its first large slot.
  void push(std::uint32_t rank) {
    const PushHeader made = header(rank, kOthers);
    const Values& values = contribution(rank);
    if (transport_.direct) {
      std::memcpy(transport_.ends[rank]->tensor.data(), values.data(), sizeof values);
      return describe(rank, tensor::bytes_of(made), {1, 0, kPartition});
    }
    const auto slot = std::ranges::find_if(control(rank).slots,
                                           [](const auto& one) { return one.capacity >= kPartition + kMaxHeader; });
    fuzz::expect(slot != control(rank).slots.end());
    message_.clear();
    append(codec::bytes_of(
        tcp::TcpFrame{tcp::TcpFrame::kMagic, slot->slot, slot->key, slot->address, sizeof made + kPartition}));
    append(tensor::bytes_of(made));
    append(std::as_bytes(std::span(values)));
    send(rank, message_);
  }
  // All members make the server keep weights, to which each of them may add.
  void store() {
    for (std::uint32_t rank = 0; rank < kMembers; ++rank) {
      PushHeader made = header(rank, 0);  // in round 0
      made.kind = tensor::OperationKind::kStore;
      made.tensor = kStored;
      if (rank > 0) made.flags &= ~tensor::kHasPayload;
      describe(rank, tensor::bytes_of(made), rank > 0 ? RemoteSpan{} : RemoteSpan{1, 0, kPartition});
    }
    settle();
    for (const auto& end : transport_.ends) {
      fuzz::expect(end->answers.size() == 1);
      end->answers.clear();
    }
  }
  // The honest members complete a round, and the first of them begins the next one.
  void end_round() {
    settle();
    push(1);
    settle();
    for (const std::uint32_t rank : {0U, 1U}) {
      expect_sum(rank);
      if (transport_.direct) std::erase(transport_.ends[rank]->answers, kAnswer);
    }
  }
  void begin_round() {
    ++round_;
    push(0);
  }
  std::uint32_t round() const { return round_; }
  // Completes, for the host, if the member that has gone bad pushes as it should.
  void push_for_host() {
    PushHeader made = header(1, 0);
    made.flags = tensor::kHasPayload | tensor::kIsPush | tensor::kIsPull | tensor::kForHost;
    made.immediate = kHostAnswer;
    made.answer_key = 0;
    describe(1, tensor::bytes_of(made), {1, 0, kPartition});
  }
  // Exactly one answer, with the sum of the two honest members.
  void expect_sum(std::uint32_t rank) {
    if (transport_.direct) {
      const DirectData& data = *transport_.ends[rank];
      fuzz::expect(std::ranges::count(data.answers, kAnswer) == 1);
      fuzz::expect(std::ranges::count(data.answers, kHostAnswer) <= (rank == 1 ? 1 : 0));
      fuzz::expect(std::ranges::all_of(data.answers, [](auto one) { return one == kAnswer || one == kHostAnswer; }));
      return expect_sum(std::as_bytes(std::span(data.tensor)));
    }
    const auto bytes = receive(rank, sizeof(tcp::TcpFrame) + kPartition);
    const auto frame = codec::decode_front<tcp::TcpFrame>(bytes);
    fuzz::expect(frame && frame->immediate == kAnswer && frame->key == 1 && frame->length == kPartition);
    expect_sum(bytes.subspan(sizeof(tcp::TcpFrame)));
  }
  std::uint64_t slot_bytes() const { return server_->slot_bytes(); }

 private:
  RecordingControl& control(std::uint32_t rank) { return *transport_.controls[rank]; }
  // What does not fit into the socket is dropped: the server has cut the sender off.
  void send(std::uint32_t rank, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto sent = ::send(sockets_[rank].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0) {
        bytes = bytes.subspan(static_cast<std::size_t>(sent));
        continue;
      }
      const bool was_full = errno == EAGAIN;
      settle();
      pollfd writable{sockets_[rank].get(), POLLOUT, 0};
      if (!was_full || ::poll(&writable, 1, 0) == 0) return;
    }
  }
  // Exactly this many bytes.
  std::span<const std::byte> receive(std::uint32_t rank, std::size_t size) {
    message_.resize(size + 1);
    std::size_t have = 0;
    for (int idle = 0; have < size && idle < 3;) {
      const auto got = ::recv(sockets_[rank].get(), message_.data() + have, message_.size() - have, 0);
      if (got > 0) have += static_cast<std::size_t>(got);
      if (got > 0) continue;
      settle();
      ++idle;
    }
    fuzz::expect(have == size);
    return std::span(message_).first(size);
  }
  std::unique_ptr<IncomingConnection> connect(const Hello& hello) {
    int fds[2];
    fuzz::expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    sockets_.emplace_back(fds[0]);
    return std::make_unique<IncomingSocket>(AuthenticatedSocket{Fd(fds[1]), hello, {}});
  }
  void append(std::span<const std::byte> bytes) {
    message_.resize(message_.size() + bytes.size());
    std::memcpy(&message_.back() + 1 - bytes.size(), bytes.data(), bytes.size());
  }

  using Values = std::array<float, kFloats>;
  // Made once, and copied and compared as bytes: the fuzzer watches every comparison of a loop over them.
  static const Values& contribution(std::uint32_t rank) {
    static const auto values = [] {
      std::array<Values, 3> made;
      for (std::size_t i = 0; i < made.size(); ++i) made[i].fill(static_cast<float>(i + 1));
      return made;
    }();
    return values[rank];
  }
  static void expect_sum(std::span<const std::byte> bytes) {
    fuzz::expect(bytes.size() == kPartition && std::memcmp(bytes.data(), contribution(2).data(), kPartition) == 0);
  }

  EventLoop& loop_;
  Counters counters_;
  std::vector<Fd> sockets_;  // the members' ends
  Bytes message_;            // what goes into one of them, or came out
  MixedTransport transport_;
  LoopedNetwork network_;
  std::unique_ptr<server::ServerLoop> server_;
  std::uint32_t round_ = 0;  // of the honest members
};

// What a push may be beside a plain one, and what its payload begins with.
Bytes disguise(PushHeader& header, Input& input) {
  Bytes head;
  const auto append = [&](std::span<const std::byte> bytes) { head.insert(head.end(), bytes.begin(), bytes.end()); };
  switch (input.take<std::uint8_t>() % 5) {
    case 0: break;
    case 1: {  // the exact sum of a host
      header.op = input.take<std::uint8_t>() % 2 == 0 ? ReduceOp::kExactSum : ReduceOp::kExactAverage;
      header.flags |= tensor::kUnrounded;
      const std::uint64_t lengths[] = {input.take<std::uint64_t>(), 16 + 2 * kPartition, kPartition, 16 + 8 * kFloats};
      const std::uint64_t parts[] = {lengths[input.take<std::uint8_t>() % std::size(lengths)], 0};
      append(std::as_bytes(std::span(parts)));
      if (input.take<std::uint8_t>() % 2 == 0) header.length = 1024;
      break;
    }
    case 2: {  // compressed
      constexpr std::string_view kTexts[] = {"int8", "topk:k=0.1", "randomk:k=3", "onebit:feedback=1",
                                             "int4:feedback=1"};
      header.flags |= tensor::kCompressed;
      header.flags &= ~tensor::kForHost;
      compress::Label label = compress::make_label(kTexts[input.take<std::uint8_t>() % std::size(kTexts)]);
      for (auto changes = input.take<std::uint8_t>() % 4; changes > 0; --changes) {
        label[input.take<std::uint8_t>() % label.size()] = input.take<std::byte>();
      }
      append(label);
      break;
    }
    case 3:  // weights for the server to keep, or to give back
      header.kind = tensor::OperationKind::kStore;
      header.tensor = kStored;
      header.round = 1;
      break;
    default:  // something to be added to them
      header.kind = tensor::OperationKind::kAccumulate;
      header.op = ReduceOp::kSum;
      header.tensor = kStored;
      header.group = tensor::kAlone | kBad;
      header.position = 0;
      header.round = input.take<std::uint8_t>();
      header.place = input.take<std::uint32_t>() & 0x00030003;
  }
  return head;
}

// Many messages of one kind, for rounds, tensors or immediates in a row. In floods it opens rounds that nobody else
// will push to, comes back to rounds that are over, and gives up what it has not pushed.
void flood(Job& job, Input& input) {
  const auto kind = input.take<std::uint8_t>();
  const auto count = input.take<std::uint8_t>();
  const auto stride = input.take<std::uint8_t>() % 4U;
  PushHeader header = job.header(kBad, kind % 3);
  header.round += static_cast<std::uint32_t>(input.take<std::int8_t>());
  header.flags &= ~tensor::kHasPayload;
  header.length = sizeof(float);
  const auto slot = job.slot_of(kBad, 0);
  for (std::uint32_t i = 0; i < count; ++i) {
    switch (kind / 4 % 4) {
      case 0: header.round += stride; break;
      case 1: header.tensor += stride; break;
      case 2: header.partition += stride; break;
      default: {
        const tensor::Cancel cancel{header.group, header.tensor, header.round + stride * i, ErrorCode::kTimeout,
                                    "what",       "hint",        {{kAnswer + i, 0}}};
        job.say(kBad, encode(cancel, kEpoch));
        continue;
      }
    }
    const auto bytes = tensor::bytes_of(header);
    job.describe(kBad, bytes, {});
    job.write(kBad, {tcp::TcpFrame::kMagic, slot.slot, slot.key, slot.address, sizeof header}, bytes);
    job.settle();
  }
}

// One step of the member that has gone bad.
void misbehave(Job& job, Input& input) {
  const auto step = input.take<std::uint8_t>();
  switch (step % 8) {
    case 0: {  // a control message, of which some bytes are changed
      static const std::vector<Bytes> samples{
          encode(tensor::Cancel{0, 11, 0, ErrorCode::kTimeout, "what", "hint", {{kAnswer, 0}, {8, 1}}}, kEpoch),
          encode(tensor::Cancel{kOthers, 11, 0, ErrorCode::kTimeout, "what", "hint", {{kAnswer, 0}}}, kEpoch),
          encode(tensor::Cancel{0, 11, 0, ErrorCode::kTimeout, "what", "hint", {{kAnswer, 0}, {8, 1}}, true}, kEpoch),
          encode(tensor::Attach{kPartition, true, 2}, kEpoch),
          encode(tensor::Ping{5}, kEpoch),
          encode(tensor::Landed{{kAnswer, kHostAnswer}}, kEpoch)};
      Bytes message = samples[input.take<std::uint8_t>() % samples.size()];
      for (auto changes = input.take<std::uint8_t>() % 8; changes > 0; --changes) {
        const auto at = input.take<std::uint8_t>() % message.size();
        message[at] = input.take<std::byte>();
      }
      return job.say(kBad, message);
    }
    case 1: {  // a valid push into a slot of its own, of which some bytes are changed
      const auto choice = input.take<std::uint8_t>();
      PushHeader header = job.header(kBad, choice % 3);
      if ((choice & 64) != 0) header.flags |= tensor::kForHost;
      const Bytes head = disguise(header, input);
      job.fill(kBad, head);
      for (auto changes = input.take<std::uint8_t>() % 8; changes > 0; --changes) {
        const auto at = input.take<std::uint8_t>() % sizeof header;
        codec::writable_bytes_of(header)[at] = input.take<std::byte>();
      }
      const auto slot = job.slot_of(kBad, input.take<std::uint8_t>());
      const auto bytes = tensor::bytes_of(header);
      const std::uint64_t lengths[] = {header.length, kPartition, input.take<std::uint64_t>(), head.size()};
      const std::uint64_t length = lengths[input.take<std::uint8_t>() % std::size(lengths)];
      const auto place = input.take<std::uint16_t>();
      job.describe(kBad, bytes, {input.take<std::uint8_t>() % 3U, place < 256 ? 0U : place, length});
      Bytes message(bytes.begin(), bytes.end());
      message.insert(message.end(), head.begin(), head.end());
      const std::uint64_t sent = sizeof header + (head.empty() ? 0 : length);
      return job.write(kBad, {tcp::TcpFrame::kMagic, slot.slot, slot.key, slot.address, sent}, message);
    }
    case 2: {  // any write near a slot that it knows
      auto slot = job.slot_of(kBad, input.take<std::uint8_t>());
      const std::int64_t distance =
          input.take<std::int8_t>() % 8 * static_cast<std::int64_t>(slot.capacity) + input.take<std::int8_t>() * 64;
      slot.address += static_cast<std::uint64_t>(distance);
      slot.slot = tensor::SlotNumber(slot.slot + static_cast<std::uint32_t>(input.take<std::int8_t>() % 4));
      const auto length = input.take<std::uint16_t>();
      return job.write(kBad, {tcp::TcpFrame::kMagic, slot.slot, slot.key, slot.address, length}, input.take_bytes(64));
    }
    case 3: {  // any frame, any posting
      const auto frame = input.take<tcp::TcpFrame>();
      job.describe(kBad, input.take_bytes(input.take<std::uint8_t>() % 80), {frame.key, frame.address, frame.length});
      return job.write(kBad, frame, input.take_bytes(64));
    }
    case 4: return job.say(kBad, input.take_bytes(input.take<std::uint8_t>()));
    case 5: return flood(job, input);
    case 6:  // time passes for the others
      if (job.round() == kMostRounds) return;
      job.end_round();
      return job.begin_round();
    default: return job.settle();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool quiet = [] {
    set_log(LogLevel::kError, "fuzz");
    return true;
  }();
  static EventLoop loop;
  if (!quiet || size < 2 || size > kMostBytes) return 0;
  Input input(std::as_bytes(std::span(data, size)));
  const auto mode = input.take<std::uint8_t>();
  const bool direct = (mode & 1) != 0;
  const bool hosts = direct && (mode & 2) != 0;
  Job job(loop, direct, hosts);
  job.push(0);
  if (hosts) job.push_for_host();
  while (!input.empty()) misbehave(job, input);
  job.end_round();
  fuzz::expect(job.slot_bytes() < 64 << 20);
  return 0;
}
