// The walk of a partition without threads, sockets or clocks, so that its instructions can be counted: two workers and
// a server in one thread, over the transport of a process to itself. bench/instructions.py runs it under callgrind.
//
//   path_bench operation N     N push_pulls of one partition of 64 bytes on each worker
//   path_bench partition N     N partitions in operations of 256
//   path_bench descriptor N    N descriptors through a ring in shared memory
//   path_bench credits N       N control messages of 8 landing slots, written and read
//   path_bench queue N         N operations through a send queue of 1,000
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/server_loop.h"
#include "tensor/push_header.h"
#include "transport/self_transport.h"
#include "transport/shm/descriptor_ring.h"
#include "worker/worker_loop.h"
#include "worker/send_queue.h"

namespace {

using namespace bps;  // NOLINT: a program of one file

constexpr std::uint32_t kWorkers = 2;
constexpr std::uint64_t kPiece = 64;

Membership members() {
  Membership all;
  all.workers = kWorkers;
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    Node node;
    node.id = i + 1;
    node.worker_rank = static_cast<std::int32_t>(i);
    all.nodes.push_back(node);
  }
  return all;
}

class Job {
 public:
  explicit Job(std::uint32_t partitions) : partitions_(partitions) {
    group_ = std::make_shared<const Group>(Group{0, {0, 1}});
    server_loop_.add_group(*group_);
    for (std::uint32_t i = 0; i < kWorkers; ++i) add_worker(i);
    settle();
  }

  void round() {
    std::vector<std::shared_ptr<Operation>> operations;
    for (Worker& worker : workers_) {
      Request request;
      request.input = request.output = worker.bytes.data();
      request.input_allocation = request.output_allocation = {worker.bytes, worker.tensor->member + 1U};
      operations.push_back(std::make_shared<Operation>(worker.tensor, request, round_, round_, 1, 1));
      worker.worker_loop->submit(operations.back(), true);
    }
    ++round_;
    while (!operations[0]->done() || !operations[1]->done()) turn();
  }

 private:
  struct Worker {
    std::unique_ptr<Reactor> reactor;
    std::unique_ptr<WorkerLoop> worker_loop;
    std::shared_ptr<Tensor> tensor;
    std::vector<std::byte> bytes;
  };

  void add_worker(std::uint32_t rank) {
    Worker worker;
    worker.reactor = std::make_unique<Reactor>("path", Spin{});
    worker.worker_loop = std::make_unique<WorkerLoop>(
        WorkerLoopOptions{.index = 0, .servers = 1, .largest_partition = 1 << 20, .staging_bytes = 1 << 20}, *worker.reactor);
    worker.bytes.resize(kPiece * partitions_);
    const Partitioning cut(worker.bytes.size(), 4, kPiece);
    worker.tensor = std::make_shared<Tensor>(cut, cut);
    worker.tensor->id = 7;
    worker.tensor->name = "path";
    worker.tensor->group = group_;
    worker.tensor->member = static_cast<std::uint16_t>(rank);
    worker.tensor->bytes = worker.bytes.size();
    worker.tensor->whole_plan.resize(1);
    for (std::uint32_t i = 0; i < partitions_; ++i) worker.tensor->whole_plan[0].push_back(i);
    Hello hello{.node = rank + 1, .client_loop = 0, .server_loop = 0, .plane = Plane::kControl};
    const auto [control, control_there] = transport_.connect_pair(hello);
    hello.plane = Plane::kData;
    const auto [data, data_there] = transport_.connect_pair(hello);
    server_loop_.add_endpoint(control_there, &transport_);
    server_loop_.add_endpoint(data_there, &transport_);
    worker.worker_loop->add_server(0, 0, "server", &transport_, control, {data});
    workers_.push_back(std::move(worker));
  }
  void turn() {
    transport_.poll();
    for (Worker& worker : workers_) worker.worker_loop->step();
    server_loop_.step();
  }
  void settle() {
    for (int i = 0; i < 8; ++i) turn();
  }

  const std::uint32_t partitions_;
  Counters counters_;
  SelfTransport transport_{counters_};
  ServerLoop server_loop_{ServerLoopOptions{.largest_partition = 1 << 20}, members(), {&transport_}, counters_};
  std::shared_ptr<const Group> group_;
  std::vector<Worker> workers_;
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

void descriptors(long count) {
  const auto memory = std::make_unique<DescriptorRing>();
  std::memset(static_cast<void*>(memory.get()), 0, sizeof(DescriptorRing));
  RingProducer out(memory.get());
  RingConsumer in(memory.get());
  const PushHeader header{};
  RingEntry taken;
  bool broken = false;
  for (long i = 0; i < count; ++i) {
    if (out.room() == 0) std::abort();
    RingEntry& added = out.add();
    added.kind = EntryKind::kDescriptor;
    added.header_size = sizeof header;
    std::memcpy(added.header.data(), &header, sizeof header);
    out.publish();
    if (!in.take(taken, broken)) std::abort();
  }
}

void credits(long count) {
  Credits message;
  for (std::uint32_t i = 0; i < 8; ++i) message.slots.push_back({i, 1, 2, 3});
  for (long i = 0; i < count; ++i) {
    if (!decode_control_message(encode(message))) std::abort();
  }
}

void queue(long count) {
  const auto tensor = std::make_shared<Tensor>(Partitioning(kPiece, 4, kPiece), Partitioning(kPiece, 4, kPiece));
  tensor->whole_plan.resize(1);
  std::vector<std::unique_ptr<Operation>> all;
  SendQueue waiting;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    Request request;
    request.priority = static_cast<std::int32_t>(i * 7919 % 1000);
    all.push_back(std::make_unique<Operation>(tensor, request, 0, i, 1, 1));
    waiting.add(all.back()->cursors.data());
  }
  for (long i = 0; i < count; ++i) {
    Operation::Cursor* most_urgent = waiting.top();
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
  } constexpr kCases[] = {{"operation", operations},
                          {"partition", partitions},
                          {"descriptor", descriptors},
                          {"credits", credits},
                          {"queue", queue}};
  for (const auto& one : kCases) {
    if (what != one.name || count <= 0) continue;
    one.run(count);
    return 0;
  }
  std::fprintf(stderr, "usage: path_bench operation|partition|descriptor|credits|queue N\n");
  return 2;
}
