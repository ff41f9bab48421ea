// SPDX-License-Identifier: Apache-2.0
// What the data path did, counted where it happens. One Counters per loop, written by that loop's thread alone and read
// by anybody: relaxed atomics without read-modify-write, so that counting costs a plain add.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bps {

class Counter {
 public:
  void add(std::uint64_t n = 1) { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

struct Counters {
  // Transport
  Counter data_writes;       // writes with immediate posted on data endpoints, whatever their length
  Counter data_bytes;        // bytes those put into peers' memory, or posted to peers that read them in place
  Counter control_messages;  // messages sent on control endpoints
  Counter control_bytes;
  Counter forged;  // control messages whose authentication code was wrong; each ended its connection
  Counter copies;  // extra copies of payload (staging, cross-memory blocks); none on mapped memory
  Counter copied_bytes;
  // Worker
  Counter partitions;       // partitions finished
  Counter operations;       // operations finished
  Counter operation_bytes;  // bytes of the tensors of those
  Counter failed;           // operations failed
  Counter credit_stalls;    // times a push loop had work and no landing slot
  // Server
  Counter pushes;          // arrivals accepted
  Counter rounds;          // rounds summed and answered
  Counter host_sums;       // rounds of one host whose sum went on to a server
  Counter summed_bytes;    // bytes of results
  Counter stale;           // arrivals refused: late, duplicate or malformed
  Counter excess;          // workers lost because they kept more open than a worker can wait for
  Counter overflow_slots;  // slots granted beyond the window to break a deadlock
  // Both
  Counter paths_lost;  // of connections that have others
  Counter repeated;    // pushes and answers that a lost path had not delivered
  // Loop
  Counter wakeups;  // returns from sleep

  std::vector<std::pair<std::string, std::uint64_t>> list() const {
    return {{"data_writes", data_writes.get()},
            {"data_bytes", data_bytes.get()},
            {"control_messages", control_messages.get()},
            {"control_bytes", control_bytes.get()},
            {"forged", forged.get()},
            {"copies", copies.get()},
            {"copied_bytes", copied_bytes.get()},
            {"partitions", partitions.get()},
            {"operations", operations.get()},
            {"operation_bytes", operation_bytes.get()},
            {"failed", failed.get()},
            {"credit_stalls", credit_stalls.get()},
            {"pushes", pushes.get()},
            {"rounds", rounds.get()},
            {"host_sums", host_sums.get()},
            {"summed_bytes", summed_bytes.get()},
            {"stale", stale.get()},
            {"excess", excess.get()},
            {"overflow_slots", overflow_slots.get()},
            {"paths_lost", paths_lost.get()},
            {"repeated", repeated.get()},
            {"wakeups", wakeups.get()}};
  }
};

}  // namespace bps
