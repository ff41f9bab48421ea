// SPDX-License-Identifier: Apache-2.0
// A transfer is what a worker loop sends to one server on behalf of an operation or a host. Send queues hold transfers.
//
// There are two kinds: a Portion of an operation, that is the partitions which this loop sends to this place, or the
// contribution of a host to one partition, when this process is its host's relay. An Operation has one Portion for each
// worker loop and place, empty ones included; the parts of a transfer are partitions. The sender, the table of
// partitions in flight and the handling of losses treat both kinds alike. Belongs to the loop's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/metrics.h"
#include "tensor/control_messages.h"
#include "tensor/extent.h"
#include "transport/region_cache.h"
#include "transport/shm/shared_memory.h"
#include "worker/route.h"

namespace bps::worker {

class Operation;
struct StagingBuffer;

// Names one partition of a transfer, and says whether it goes to the server itself or to the relay of this host.
struct Part {
  static constexpr std::uint32_t kDirect = ~std::uint32_t{0};
  std::uint32_t partition = 0;
  std::uint32_t place = kDirect;  // for the relay: the server loop that the host's contribution goes on to
  std::uint32_t turn = 0;         // how many partitions of its worker loop come before it

  bool for_host() const { return place != kDirect; }
};

// Holds the result of a partition in two phases, as far as a rank has it when its view ends.
struct Landed {
  std::shared_ptr<transport::shm::SharedMemory> aside;  // all of it, in a buffer; or null
  std::uint64_t in_place = 0;                           // how many of its first bytes are where they belong
};

class Transfer {
 public:
  static constexpr std::uint8_t kNoPace = 0xff;

  virtual ~Transfer() = default;

  Operation* operation = nullptr;  // the operation whose part it is; null for a contribution of a host
  std::span<const Part> parts;
  std::uint32_t next = 0;        // the first part that was not sent
  std::uint32_t unfinished = 0;  // how many parts were not sent, or not answered
  std::int32_t priority = 0;     // higher first
  Route route = Route::kStaged;
  Finality finality = Finality::kAnswer;
  std::uint8_t pace = kNoPace;    // which of the paces of its operation it keeps
  bool cancelled : 1 = false;     // nothing more is sent, and the server has been told
  std::uint8_t fetched_ : 7 = 0;  // the last bits of Portion::fetched(), which are here because a Portion has no room
  std::uint64_t sequence = 0;     // among equal priorities, the lower one goes first
  const tensor::PushHeader* header = nullptr;  // the header of each push, without what the sender adds
  // Partitions that are encoded or copied, and not sent yet, wait here, the next one first. Encoding changes what is
  // remembered of the tensor, and a GPU's copy takes time, so each is done once.
  StagingBuffer* encoded = nullptr;
  // The caller's bytes lie here. Their blocks are registered with the server's transport before the transfer enters the
  // send queue, and held until the last answer.
  const std::byte* input_bytes = nullptr;
  std::byte* output_bytes = nullptr;
  transport::RegionPtr input{};
  transport::RegionPtr output{};

  std::uint32_t unsent() const { return static_cast<std::uint32_t>(parts.size()) - next; }

  virtual tensor::Extent extent_of(const Part& part) const = 0;
  // Puts the payload into a staging buffer. Where its length depends on the values, fill() also says how long it is.
  // compress/codec_call.h explains kCodec.
  virtual Status fill(const Part& part, tensor::Extent& extent, std::byte* into, Counters& counters) = 0;
  // Takes the answer out of a staging buffer. Returns kProtocol where no server that keeps the protocol sends this.
  virtual Status take_answer(const Part& part, const tensor::Extent& extent, const std::byte* from,
                             Counters& counters) = 0;

  // To be called when a partition in two phases will have no answer in this view; what has landed may be committed
  // elsewhere. `failed` says that it is committed nowhere, because the server has failed its round, or never had this
  // rank's part of it. Returns true when the next view has a use for what has landed.
  virtual bool suspend(std::uint32_t partition, const Landed& landed, bool failed) = 0;

  // Notes why it cannot complete. Returns true for the first reason, which counts.
  virtual bool fail(ErrorCode code, const std::string& what, const std::string& hint) = 0;
  // Tells which ranks the server still waited for when it was cancelled.
  virtual void note_missing(const std::string& server, const std::vector<std::uint32_t>& ranks) = 0;
  // Returns the message that its server is sent when it is cancelled, without the partitions.
  virtual tensor::Cancel make_cancel() const = 0;
  // Notes that partitions are over, `answered` or not. With the last one the transfer may vanish.
  virtual void finish(std::uint32_t count, bool answered, Counters& counters) = 0;
};

inline TraceKey trace_key(const Transfer& transfer, const Part& part) {
  const tensor::PushHeader& header = *transfer.header;
  return {header.group, header.tensor, header.round, part.partition, part.for_host()};
}

inline void trace(Counters& counters, TraceStage stage, const Transfer& transfer, const Part& part,
                  std::uint32_t node) {
  if (counters.trace != nullptr) [[unlikely]]
    counters.trace->record(stage, trace_key(transfer, part), node, 0);
}

}  // namespace bps::worker
