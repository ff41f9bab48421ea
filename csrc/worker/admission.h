// SPDX-License-Identifier: Apache-2.0
// Lets operations into a worker loop. They wait in a ring, and everything that can fail is set up before they enter a
// send queue.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/metrics.h"
#include "core/ring.h"
#include "transport/reactor.h"
#include "worker/cancellation.h"
#include "worker/connections.h"
#include "worker/device_copies.h"
#include "worker/operation.h"

namespace bps::worker {

// Returns true when a tensor that is declared with a compression travels compressed to this server. Within a host
// compression would cost time and save nothing.
bool compresses_to(const ServerConnection& server, const Tensor& tensor);
// Puts a transfer into the send queue of its server.
void enqueue(Transfer& transfer, ServerConnection& server, Connections& connections, Counters& counters);

class Admission {
 public:
  // `gpudirect`: RDMA devices use the memory of GPUs themselves where they can.
  Admission(transport::Reactor& reactor, Connections& connections, Cancellation& cancellation, DeviceCopies& copies,
            bool gpudirect);

  struct Submission {
    std::shared_ptr<Operation> operation;
    bool watches_deadline = false;
  };
  // Any thread may call this. Throws kTimeout when the loop does not keep up with the submissions.
  void submit(const std::shared_ptr<Operation>& operation, bool watches_deadline);

  // ---- The loop's thread
  bool is_empty() const { return submissions_.empty(); }
  // Returns false when there is none.
  bool take(Submission& submission) { return submissions_.pop(submission); }
  // Fails the operations that are admitted from now on with this error, and sends nothing of them, because this process
  // leaves. A server would refuse them because this rank has left; to other ranks that is the same, but not to the
  // caller.
  void end(const Error& why) { ended_ = why; }
  // Registers the memory of an operation, chooses its routes, makes the buffers that they need, and enqueues its parts.
  // An operation that fails stays out of the queues.
  void admit(Operation& operation);
  // Makes another staging buffer for the transfer that needs one, which fails if none can be made.
  void add_buffer(ServerConnection& server);

 private:
  void set_pace(Operation& operation);
  void admit(Portion& portion, ServerConnection& server);
  void prepare(Portion& portion, ServerConnection& server);
  bool register_memory(Portion& portion, ServerConnection& server);
  bool register_on_device(Portion& portion, ServerConnection& server) const;

  transport::Reactor& reactor_;
  Counters& counters_;
  Connections& connections_;
  Cancellation& cancellation_;
  DeviceCopies& copies_;
  const bool gpudirect_;
  std::optional<Error> ended_;
  MpscRing<Submission> submissions_;
  std::vector<bool> meets_;  // by place: memory of set_pace(), kept so that it allocates nothing
};

}  // namespace bps::worker
