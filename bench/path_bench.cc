// SPDX-License-Identifier: Apache-2.0
// The walk of a partition without threads, sockets or clocks, so that its instructions can be counted: two workers and
// a server in one thread, over the transport of a process to itself. bench/instructions.py runs it under callgrind.
//
//   path_bench operation N     N push_pulls of one partition of 64 bytes on each worker
//   path_bench partition N     N partitions in operations of 256
//   path_bench traced N        the same with a trace, whose events are taken out of the rings after each operation
//   path_bench posting N    N postings through a ring in shared memory
//   path_bench credits N       N control messages of 8 landing slots, written and read
//   path_bench queue N         N operations through a send queue of 1,000
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "core/trace.h"
#include "server/server_loop.h"
#include "tensor/push_header.h"
#include "transport/local/self_transport.h"
#include "transport/shm/posting_ring.h"
#include "worker/send_queue.h"
#include "worker/worker_loop.h"

namespace {

using namespace bps;  // NOLINT: a program of one file

constexpr std::uint32_t kWorkers = 2;
constexpr std::uint64_t kPiece = 64;

van::Membership members() {
  van::Membership all;
  all.workers = kWorkers;
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    van::Node node;
    node.id = i + 1;
    node.worker_rank = static_cast<std::int32_t>(i);
    node.worker_loops = 1;
    all.nodes.push_back(node);
  }
  return all;
}

class Job {
 public:
  explicit Job(std::uint32_t partitions, bool is_traced = false) : partitions_(partitions) {
    if (is_traced) counters_.trace = &rings_.emplace_back(TracedRounds{});
    group_ = std::make_shared<const van::Group>(van::Group{0, {0, 1}});
    server_loop_.add_group(*group_);
    for (std::uint32_t i = 0; i < kWorkers; ++i) add_worker(i);
    settle();
  }

  void round() {
    std::vector<std::shared_ptr<worker::Operation>> operations;
    for (Rank& worker : workers_) {
      worker::Request request;
      request.input = request.output = worker.bytes.data();
      request.input_allocation = request.output_allocation = {worker.bytes, worker.tensor->position + 1U};
      operations.push_back(std::make_shared<worker::Operation>(worker.tensor, request, round_, round_, 1, 1));
      worker.worker_loop->submit(operations.back(), true);
    }
    ++round_;
    while (!operations[0]->is_done() || !operations[1]->is_done()) turn();
    for (TraceRing& ring : rings_) {
      const auto noted = ring.noted();
      ring.free(noted[0].size() + noted[1].size());
    }
  }

 private:
  struct Rank {
    std::unique_ptr<transport::Reactor> reactor;
    std::unique_ptr<worker::WorkerLoop> worker_loop;
    std::shared_ptr<worker::Tensor> tensor;
    std::vector<std::byte> bytes;
  };

  void add_worker(std::uint32_t rank) {
    Rank worker;
    worker.reactor = std::make_unique<transport::Reactor>("path", transport::Spin{});
    if (counters_.trace != nullptr) worker.reactor->counters().trace = &rings_.emplace_back(TracedRounds{});
    worker.worker_loop = std::make_unique<worker::WorkerLoop>(
        worker::WorkerLoopOptions{.index = 0, .places = 1, .largest_partition = 1 << 20, .staging_bytes = 1 << 20},
        *worker.reactor);
    worker.bytes.resize(kPiece * partitions_);
    const tensor::Partitioning cut(worker.bytes.size(), 4, kPiece);
    worker.tensor = std::make_shared<worker::Tensor>(cut, cut);
    worker.tensor->id = 7;
    worker.tensor->name = "path";
    worker.tensor->group = group_;
    worker.tensor->position = static_cast<std::uint16_t>(rank);
    worker.tensor->bytes = worker.bytes.size();
    worker.tensor->plans.whole.resize(1);
    for (std::uint32_t i = 0; i < partitions_; ++i) worker.tensor->plans.whole[0].push_back({i});
    const transport::ConnectRequest request{
        .address = {}, .hello = {.node = rank + 1}, .deadline = Deadline::after(10), .whom = "server"};
    worker::ServerConnection& server = worker.worker_loop->add_server(0, 0, "server", transport_);
    transport::ControlEndpoint* control = transport_.attach(transport_.connect_control(request), server);
    server_loop_.accept(transport_.incoming(), &transport_);
    transport::DataEndpoint* data = transport_.attach(transport_.connect_data(request), server);
    server_loop_.accept(transport_.incoming(), &transport_);
    worker.worker_loop->open(server, control, {data});
    workers_.push_back(std::move(worker));
  }
  void turn() {
    transport_.poll();
    for (Rank& worker : workers_) worker.worker_loop->step();
    server_loop_.step();
  }
  void settle() {
    for (int i = 0; i < 8; ++i) turn();
  }

  const std::uint32_t partitions_;
  std::deque<TraceRing> rings_;
  Counters counters_;
  transport::local::SelfTransport transport_{counters_};
  server::ServerLoop server_loop_{
      server::ServerLoopOptions{.largest_partition = 1 << 20}, members(), {&transport_}, counters_};
  std::shared_ptr<const van::Group> group_;
  std::vector<Rank> workers_;
  std::uint32_t round_ = 0;
};

void operations(long count) {
  Job job(1);
  for (long i = 0; i < count; ++i) job.round();
}

void partitions(long count) {
  constexpr long kInOne = 256;
  Job job(kInOne);
  for (long i = 0; i < count; i += kInOne) job.round();
}

void traced(long count) {
  constexpr long kInOne = 256;
  Job job(kInOne, true);
  for (long i = 0; i < count; i += kInOne) job.round();
}

void postings(long count) {
  const auto memory = std::make_unique<transport::shm::PostingRing>();
  std::memset(static_cast<void*>(memory.get()), 0, sizeof(transport::shm::PostingRing));
  transport::shm::RingProducer out(memory.get());
  transport::shm::RingConsumer in(memory.get());
  const tensor::PushHeader header{};
  transport::shm::RingEntry taken;
  bool broken = false;
  for (long i = 0; i < count; ++i) {
    if (out.room() == 0) std::abort();
    transport::shm::RingEntry& added = out.add();
    added.kind = transport::shm::EntryKind::kPosting;
    added.header_size = sizeof header;
    std::memcpy(added.header.data(), &header, sizeof header);
    out.publish();
    if (!in.take(taken, broken)) std::abort();
  }
}

void credits(long count) {
  tensor::Credits message;
  for (std::uint32_t i = 0; i < 8; ++i) message.slots.push_back({tensor::SlotNumber(i), 1, 2, 3});
  for (long i = 0; i < count; ++i) {
    if (!tensor::decode(encode(message, 1), 1)) std::abort();
  }
}

void queue(long count) {
  const auto tensor = std::make_shared<worker::Tensor>(tensor::Partitioning(kPiece, 4, kPiece),
                                                       tensor::Partitioning(kPiece, 4, kPiece));
  tensor->group = std::make_shared<const van::Group>(van::Group{0, {0, 1}});
  tensor->plans.whole.resize(1);
  std::vector<std::unique_ptr<worker::Operation>> all;
  worker::SendQueue waiting;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    worker::Request request;
    request.priority = static_cast<std::int32_t>(i * 7919 % 1000);
    all.push_back(std::make_unique<worker::Operation>(tensor, request, 0, i, 1, 1));
    waiting.add(all.back()->portions.data());
  }
  for (long i = 0; i < count; ++i) {
    worker::Transfer* most_urgent = waiting.top();
    waiting.pop();
    waiting.add(most_urgent);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc == 3 ? argv[1] : "";
  const long count = argc == 3 ? std::strtol(argv[2], nullptr, 10) : 0;
  struct {
    std::string_view name;
    void (*run)(long);
  } constexpr kCases[] = {{"operation", operations}, {"partition", partitions}, {"traced", traced},
                          {"posting", postings},     {"credits", credits},      {"queue", queue}};
  for (const auto& one : kCases) {
    if (what != one.name || count <= 0) continue;
    one.run(count);
    return 0;
  }
  std::fprintf(stderr, "usage: path_bench operation|partition|traced|posting|credits|queue N\n");
  return 2;
}
