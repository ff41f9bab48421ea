// SPDX-License-Identifier: Apache-2.0
// Makes a worker loop and two servers in one thread, with nothing between them but the transport of a process to
// itself.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "server/server_loop.h"
#include "transport/local/self_transport.h"
#include "van/members.h"
#include "worker/worker_loop.h"

namespace bps::worker::testing {

inline constexpr std::uint64_t kPiece = 1024;

class WorkerLoopTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kServers = 2;
  static constexpr double kSilence_s = 0.1;

  explicit WorkerLoopTest(std::uint64_t credit = 4 * kPiece)
      : worker_loop(WorkerLoopOptions{.index = 0,
                                      .places = kServers,
                                      .scheduling_credit = credit,
                                      .largest_partition = 1 << 20,
                                      .staging_bytes = 1 << 20,
                                      .silence_s = kSilence_s},
                    reactor) {
    const van::Membership members = van::members_with_one_loop(2);  // the second one never says anything
    for (std::size_t i = 0; i < kServers; ++i) {
      server_loops.push_back(
          std::make_unique<server::ServerLoop>(server::ServerLoopOptions{.largest_partition = 1 << 20}, members,
                                               std::vector<transport::Transport*>{&transport}, counters[i]));
      server_loops.back()->add_group(*group);
      server_loops.back()->add_group(*with_silent);
      const transport::ConnectRequest request{
          .address = {}, .hello = {.node = 1}, .deadline = Deadline::after(10), .whom = "server"};
      ServerConnection& server = worker_loop.add_server(i, static_cast<std::uint32_t>(i), "server", transport);
      transport::ControlEndpoint* control = transport.attach(transport.connect_control(request), server);
      server_loops.back()->accept(transport.incoming(), &transport);
      transport::DataEndpoint* data = transport.attach(transport.connect_data(request), server);
      server_loops.back()->accept(transport.incoming(), &transport);
      worker_loop.open(server, control, {data});
      servers.push_back(&server);
      controls.push_back(control);
    }
    for (int i = 0; i < 4; ++i) deliver();
  }

  // Submits an operation of `pieces` on each server.
  std::shared_ptr<Operation> submit(std::uint32_t pieces, std::int32_t priority) {
    return submit(pieces, priority, group);
  }
  std::shared_ptr<Operation> submit(std::uint32_t pieces, std::int32_t priority,
                                    const std::shared_ptr<const van::Group>& of) {
    const auto tensor = declare(pieces, of);
    Request request;
    request.priority = priority;
    return submit(tensor, request);
  }
  std::shared_ptr<Tensor> declare(std::uint32_t pieces, const std::shared_ptr<const van::Group>& of) {
    const std::uint64_t bytes = kPiece * pieces * kServers;
    memory.emplace_back(bytes, std::byte{1});
    auto tensor =
        std::make_shared<Tensor>(tensor::Partitioning(bytes, 1, kPiece), tensor::Partitioning(bytes, 1, kPiece));
    tensor->name = "tensor";
    tensor->id = static_cast<std::uint32_t>(memory.size());
    tensor->group = of;
    tensor->dtype = Dtype::kUint8;
    tensor->bytes = bytes;
    tensor->plans.whole.resize(kServers);
    for (std::uint32_t i = 0; i < pieces * kServers; ++i) tensor->plans.whole[i % kServers].push_back({i});
    return tensor;
  }
  // Submits an operation of the tensor that was declared last, in its first round.
  std::shared_ptr<Operation> submit(const std::shared_ptr<Tensor>& tensor, Request request) {
    request.input = request.output = memory.back().data();
    request.input_allocation = request.output_allocation = {memory.back(), memory.size()};
    auto operation = std::make_shared<Operation>(tensor, request, 0, sequence++, 1, kServers);
    worker_loop.submit(operation, true);
    return operation;
  }

  void deliver() {
    transport.poll();
    for (const auto& server_loop : server_loops) server_loop->step();
  }
  static Request one_half(bool pushes) {
    Request request;
    request.kind = tensor::OperationKind::kSplit;
    request.pushes = pushes;
    request.pulls = !pushes;
    return request;
  }
  void abort_all() {
    worker_loop.abort_operations([](const Operation&) { return true; }, ErrorCode::kTimeout, "too late", "");
  }
  std::uint64_t pushes(std::size_t server) const { return counters[server].pushes.get(); }

  Counters counters[kServers];
  Counters own;
  transport::local::SelfTransport transport{own};
  std::shared_ptr<const van::Group> group = std::make_shared<const van::Group>(van::Group{0, {0}});
  std::shared_ptr<const van::Group> with_silent = std::make_shared<const van::Group>(van::Group{1, {0, 1}});
  transport::Reactor reactor{"test", transport::Spin{}};  // is never started: the test is its thread
  WorkerLoop worker_loop;
  std::vector<std::unique_ptr<server::ServerLoop>> server_loops;
  std::vector<ServerConnection*> servers;
  std::vector<transport::ControlEndpoint*> controls;
  std::vector<std::vector<std::byte>> memory;
  std::uint64_t sequence = 0;
};

}  // namespace bps::worker::testing
