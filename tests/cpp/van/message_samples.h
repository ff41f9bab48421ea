// SPDX-License-Identifier: Apache-2.0
// Makes one or more of each van message, for round trips, mutations and as seeds of the fuzzer.
#pragma once

#include <vector>

#include "core/dtype.h"
#include "van/messages.h"

namespace bps::van::test {

inline Node sample_node(std::uint32_t id, std::int32_t worker, std::int32_t server) {
  return {.id = id,
          .worker_rank = worker,
          .server_rank = server,
          .worker_loops = 2,
          .server_loops = 3,
          .pid = 42,
          .host = "host-a",
          .host_key = "boot-1234",
          .link = 1'250'000'000,
          .sum_rate = 4'000'000'000U + id,
          .terms = {.min_workers = 2, .placement = "auto", .key_hash = "raw", .mixed_bound = 101, .async = true},
          .addresses = {{"shm", Bytes(5, std::byte{7})}, {"tcp", Bytes(12, std::byte{1})}}};
}

inline std::vector<Message> message_samples() {
  const Membership membership{.nodes = {sample_node(1, 0, 1), sample_node(2, 1, kNoRank), sample_node(3, kNoRank, 0)},
                              .workers = 2,
                              .servers = 2,
                              .slots = {9, 0, 0}};
  const auto float32 = static_cast<std::uint8_t>(Dtype::kFloat32);
  return {
      Join{sample_node(0, kAnyRank, kNoRank), 2, 2, 60000},
      Welcome{1500, 500, 77, membership},
      Refused{ErrorCode::kMismatch, "rank 1 is taken", "choose another"},
      Heartbeat{},
      Barrier{7, 0, 65536, true},
      Done{7, 65536, 0},
      Rejoin{.run = 77,
             .you = 2,
             .membership = membership,
             .barriers = {{0, 12}, {3, 1}},
             .groups = {{{3, {0, 1}}, "tp"}},
             .waiting_barriers = {Barrier{7, 0, 0, true}},
             .waiting_groups = {NewGroup{12, {0, 1}, "dp"}},
             .left = {1}},
      Failed{8, ErrorCode::kPeerLost, "worker 1 was lost", "see its log"},
      Cancel{9},
      Missing{9, "ranks 1, 3 did not come"},
      Declare{10, {{0, "layer.0.weight", float32, 12, "(3, 4)"}, {1, "b", float32, 0, "(0,)"}}},
      Declare{11, {}},
      Declared{10, {{1234, {}}, {(1U << 30) - 1, {1, 2}}}},
      TensorFailed{1234, "tensor 'w' is float32 (3, 4) on rank 0 but float64 (3, 4) on rank 1"},
      LateRound{3, 1234, 17, tensor::OperationKind::kAllGather},
      RoundFailed{3, 1234, 17, "rank 0 called push_pull, and rank 1 all_gather"},
      NewGroup{12, {0, 1}, "tp"},
      GroupInfo{{3, {0, 2, 5}}},
      GroupAck{3},
      GroupReady{12, 3},
      Leave{7, 2, "worker 1 was lost: connection closed", ""},
      Leave{7, 0, "ValueError: no such file", ""},
      Leave{7, 0, "", "push_pull of 'x', round 0: rank 1 gave up"},
      Leave{7, 0, "", "", true},
      Departed{{{2, false, "worker 1 has left the job"}, {3, true, "server 2 was lost"}}},
      ViewEnded{2, "worker 1 was lost: connection closed"},
      ViewEnded{2, "the workers have suspended the job", 670000},
      Suspect{3, true},
      Reachable{3},
      Ask{5, true},
      Asked{5, 3, R"({"phase":"running"})"},
      Question{7, false},
      Reply{7, R"({"operations":[]})"},
      Told{5, 2, R"({"operations":[]})"},
      AllLeft{true},
      AllLeft{false},
      AllLeft{true, "nobody has resumed the job for 600 s, and it is over"},
      PeerLost{2, "worker 1 was lost: connection closed"},
      LinkUse{{{2, 1 << 20, 80000}, {3, 1, 0}}},
      BeginShift{3},
      Rounds{3, {{0, 1234, 7}, {1, 12, 1}}},
      EndShift{3, {125000000, 31250000, 0}, {{0, 1234, 8}}},
      EndShift{3, {}, {}},
  };
}

}  // namespace bps::van::test
