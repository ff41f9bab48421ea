// SPDX-License-Identifier: Apache-2.0
// Holds operations back whose memory RDMA devices read and write themselves (Route::kDeviceDirect), until the GPU has
// reached their caller's call. So nothing is read that kernels still make, and nothing replaced that they still read.
//
// An operation's portions enter the send queues when a mark is reached that lies in a stream behind the points of the
// caller's streams. That stream holds nothing else, so there is nothing to undo where an operation ends before: its
// portions are dropped when their mark is reached, as nothing of them was sent. An operation whose GPU is late holds up
// those behind it. Belongs to the loop's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "device/copy_stream.h"
#include "transport/reactor.h"
#include "worker/cancellation.h"
#include "worker/connections.h"

namespace bps::worker {

class DeviceGate {
 public:
  DeviceGate(transport::Reactor& reactor, Connections& connections, Cancellation& cancellation)
      : reactor_(reactor), connections_(connections), cancellation_(cancellation) {}

  // Makes the stream. It is set-up, and throws.
  void prepare(const device::Device& device);
  bool is_used() const { return !gpus_.empty(); }
  // Takes a portion, which enters the send queue later, or aborts the operation if the driver refuses that.
  void hold(Portion& portion, ServerConnection& server);
  // Lets those go whose call has been reached. Returns true when it did something.
  bool step();
  // Makes the streams ring the loop's doorbell, before the loop sleeps. Returns false where one may go already.
  bool arm();
  // Looks whether a device has failed, or has refused a mark, because no flag would ever say so.
  void check();
  // Waits for a while for the streams to end.
  void end() { gpus_.clear(); }

  // Calls `look` with each portion that is held for this server.
  template <typename F>
  void for_each_held(const ServerConnection& server, F look) const {
    for (const auto& gpu : gpus_) {
      for (const Held& one : gpu->held) {
        if (one.server == &server) look(*one.portion);
      }
    }
  }

 private:
  struct Held {
    std::shared_ptr<Operation> of;
    Portion* portion;
    ServerConnection* server;
    std::uint32_t mark;
  };
  struct Gpu {
    Gpu(const device::Device& of, int doorbell)
        : device(of), stream(std::make_unique<device::CopyStream>(of, doorbell)) {}
    ~Gpu() {
      const device::Device::Current current(device);
      stream.reset();
    }
    Gpu(const Gpu&) = delete;
    Gpu& operator=(const Gpu&) = delete;

    bool may_open() const { return !held.empty() && stream->reached(held.front().mark); }
    const device::Device& device;
    std::unique_ptr<device::CopyStream> stream;
    std::deque<Held> held;
  };
  Gpu& gpu_of(const device::Device& device) const;
  void trace_hold(const Portion& portion, const ServerConnection& server);

  transport::Reactor& reactor_;
  Connections& connections_;
  Cancellation& cancellation_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
};

}  // namespace bps::worker
