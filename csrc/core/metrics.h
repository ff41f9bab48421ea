// SPDX-License-Identifier: Apache-2.0
// Counts what the data path does, in the place where it happens. Each loop has its Counters.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/counter.h"
#include "core/histogram.h"
#include "core/trace.h"

namespace bps {

// Counts what GPUs copy from tensors, and to them.
struct DeviceCounter {
  Counter from;
  Counter to;
  std::uint64_t get() const { return from.get() + to.get(); }
};

struct Counters {
  // Transport
  Counter data_writes;       // writes with immediate posted on data endpoints, whatever their length
  Counter data_bytes;        // bytes those put into peers' memory, or posted to peers that read them in place
  Counter received_bytes;    // bytes of contributions that servers here took, and of results that workers here got
  Counter control_messages;  // messages sent on control endpoints
  Counter control_bytes;
  Counter forged;  // control messages whose authentication code was wrong; each ended its connection
  Counter copies;  // extra copies of payload (staging, cross-memory blocks); none on mapped memory
  Counter copied_bytes;
  DeviceCounter device_copies;
  DeviceCounter device_bytes;
  Counter unwatched_bytes;   // bytes of tensors that were staged because nobody tells when their memory is given back
  Counter given_back;        // blocks whose pages had changed since their last use: each was registered anew, or staged
  Counter compressed_bytes;  // bytes of payloads and results that this process sent or took compressed
  Counter uncompressed_bytes;  // how many bytes the same would have been
  // Worker
  Counter partitions;       // partitions finished
  Counter operations;       // operations finished
  Counter operation_bytes;  // bytes of the tensors of finished operations
  Counter failed;           // operations failed
  Counter credit_stalls;    // times a worker loop could not send yet what it had to push: see Sender
  Counter pace_stalls;      // times the pace of the operation was the reason: see Pace
  // Server
  Counter pushes;          // arrivals accepted
  Counter rounds;          // rounds summed and answered
  Counter host_sums;       // rounds of one host whose sum went on to a server
  Counter summed_bytes;    // bytes of results
  Counter stale;           // arrivals refused: late, duplicate or malformed
  Counter excess;          // workers lost because they kept more open than a worker can wait for
  Counter overflow_slots;  // slots granted beyond the window to break a deadlock
  // Both
  Counter paths_lost;  // paths lost of connections that have others
  Counter repeated;    // pushes and answers that a lost path had not delivered
  // Loop
  Counter wakeups;  // returns from sleep

  // Times complete operations from start to end. It stays empty unless somebody wants it (Tensor::is_timed).
  DurationHistogram operation_times;
  // The loop notes here what happens. It is null unless the loop is traced, and set before the loop starts.
  TraceRing* trace = nullptr;

  std::vector<std::pair<std::string, std::uint64_t>> list() const {
    return {{"data_writes", data_writes.get()},
            {"data_bytes", data_bytes.get()},
            {"received_bytes", received_bytes.get()},
            {"control_messages", control_messages.get()},
            {"control_bytes", control_bytes.get()},
            {"forged", forged.get()},
            {"copies", copies.get()},
            {"copied_bytes", copied_bytes.get()},
            {"device_copies_from", device_copies.from.get()},
            {"device_copies_to", device_copies.to.get()},
            {"device_bytes_from", device_bytes.from.get()},
            {"device_bytes_to", device_bytes.to.get()},
            {"unwatched_bytes", unwatched_bytes.get()},
            {"given_back", given_back.get()},
            {"compressed_bytes", compressed_bytes.get()},
            {"uncompressed_bytes", uncompressed_bytes.get()},
            {"partitions", partitions.get()},
            {"operations", operations.get()},
            {"operation_bytes", operation_bytes.get()},
            {"failed", failed.get()},
            {"credit_stalls", credit_stalls.get()},
            {"pace_stalls", pace_stalls.get()},
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
