// SPDX-License-Identifier: Apache-2.0
// Makes the copies of a worker loop from and to GPUs, for Route::kDevice and kDeviceEncoded.
//
// On the way out, a partition is copied into a staging buffer before its transfer enters the send queue, so that a
// tensor whose GPU is late holds up no other memory: ServerConnection::fetching -> copy -> Transfer::encoded and the
// queue. No partition is sent before its device has reached the caller's call, so that what answers overwrite is not in
// use. On the way in, an answer in its buffer is copied to the caller's tensor, and the partition completes when that
// copy has ended. Nothing else ends it meanwhile (InFlight::Stage::kCopying), and its immediate names nothing any more.
// In two phases it stays in the buffer until the server commits it, so that the tensor keeps what was in it.
//
// The copies under way are a list through their staging buffers, so that none allocates. DeviceArrays::copies counts
// each until it ends. A copy from a tensor that fails meanwhile keeps its buffer, also if the driver refused to put it
// or its mark into the stream: only the stream's end tells what it had taken. A device that has failed fails what it
// copies for. One that hangs keeps its operations open, and keeps what it may still write to for ever. Belongs to the
// loop's thread: the one that holds the progress lock.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/clock.h"
#include "device/copy_stream.h"
#include "transport/reactor.h"
#include "worker/cancellation.h"
#include "worker/connections.h"
#include "worker/device_gate.h"
#include "worker/partitions_in_flight.h"

namespace bps::worker {

class DeviceCopies {
 public:
  DeviceCopies(transport::Reactor& reactor, Connections& connections, PartitionsInFlight& partitions,
               Cancellation& cancellation)
      : gate(reactor, connections, cancellation),
        reactor_(reactor),
        connections_(connections),
        partitions_(partitions),
        cancellation_(cancellation) {}

  // Makes the streams, and pins the buffers by which this server is reached. It is set-up, when an operation is
  // admitted, and throws.
  void prepare(const Portion& portion, ServerConnection& server);
  // Returns true when some device has been used.
  bool is_used() const { return !gpus_.empty() || gate.is_used(); }
  // Looks which copies have ended, and starts others. Returns true when it did something.
  bool step();
  // Returns true while a copy waits for a staging buffer.
  bool is_blocked() const { return is_blocked_; }
  // Makes the copies under way ring the loop's doorbell, before the loop sleeps. Returns false where one has ended
  // already.
  bool arm();
  // Decodes an answer that is compressed, within staging buffers. Otherwise as PartitionsInFlight::take_answer().
  Status decode(InFlight& entry);
  // Starts the copy of an answer from its buffer to the tensor, or aborts the operation if the driver refuses it.
  // Returns false where there is nothing to copy.
  bool take_answer(std::uint32_t index);
  // Looks whether a device has failed, or has refused a mark, because no flag of its copies would ever say so.
  void check();
  // Waits for a while for what is under way, when the loop ends and nothing is sent any more.
  void end();

  // Calls `look` with each transfer to this server of which a copy from a device is under way, or that the gate holds.
  template <typename F>
  void for_each_fetching(const ServerConnection& server, F look) const {
    gate.for_each_held(server, look);
    for (const auto& gpu : gpus_) {
      for (const StagingBuffer* one = gpu->out.first; one != nullptr; one = one->next) {
        if (one->copy.server == &server) look(*one->copy.transfer);
      }
    }
  }

  DeviceGate gate;  // for what is not copied

 private:
  struct Ended {
    StagingBuffer* buffer;
    StagingBuffer::Copy copy;
  };
  // Keeps the copies of one direction, in the order of their stream.
  struct Copies {
    Copies(device::Device& device, int doorbell) : stream(device, doorbell) {}
    device::CopyStream stream;
    StagingBuffer* first = nullptr;
    StagingBuffer* last = nullptr;
    bool empty() const { return first == nullptr; }
    bool has_ended() const { return !empty() && stream.reached(first->copy.mark); }
    // Adds a copy, whose mark is the last one of the stream.
    void add(StagingBuffer* buffer, Transfer& transfer, ServerConnection* server, std::uint32_t entry);
    Ended take();
    void keep_memory();
  };
  struct Gpu {
    Gpu(device::Device& of, int doorbell) : device(of), out(of, doorbell), in(of, doorbell) {}
    device::Device& device;
    Copies out;  // from the device
    Copies in;   // to the device
    bool is_copying() const { return !out.empty() || !in.empty(); }
  };
  Gpu& gpu_of(const Transfer& transfer);
  bool finish(Gpu& gpu);
  bool fetch(ServerConnection& server);
  bool start(ServerConnection& server, Portion& portion);
  StagingBuffer* take_buffer(ServerConnection& server, const Gpu& gpu, Operation& operation);
  static device::cuda::Result wait_for_call(Gpu& gpu, const DeviceArrays& arrays);
  static void mark_call(Gpu& gpu);
  bool is_traced(const Transfer& transfer) const;
  void refuse(const Gpu& gpu, Operation& operation, device::cuda::Result result);
  void note_filled(const Ended& ended);
  void count(Counter DeviceCounter::* direction, std::uint64_t bytes);
  void trace_begin(Gpu& gpu);
  void fail(Gpu& gpu, const Error& why);

  transport::Reactor& reactor_;
  Connections& connections_;
  PartitionsInFlight& partitions_;
  Cancellation& cancellation_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
  bool is_blocked_ = false;
};

}  // namespace bps::worker
