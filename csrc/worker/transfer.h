// SPDX-License-Identifier: Apache-2.0
// The bytes that a worker loop sends to one server on behalf of an operation or a host: the entry of a send queue.
//
// There are two kinds: a Portion of an operation, that is the partitions which this loop sends to this place, or the
// contribution of a host to one partition, when this process is its host's relay. An Operation has one Portion for each
// worker loop and place, empty ones included; the parts of a transfer are partitions. The sender, the table of
// partitions in flight and the handling of losses treat both kinds alike. Threading: the loop's.
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

// One partition of a transfer, and whether it goes to the server itself or to the relay of this host.
struct Part {
  static constexpr std::uint32_t kDirect = ~std::uint32_t{0};
  std::uint32_t partition = 0;
  std::uint32_t place = kDirect;  // for the relay: the server loop that the host's contribution goes on to
  std::uint32_t turn = 0;         // how many partitions of its worker loop come before it

  bool for_host() const { return place != kDirect; }
};

// The result of a partition in two phases, as far as a rank has it when its view ends.
struct Landed {
  std::shared_ptr<transport::shm::SharedMemory> aside;  // all of it, in a buffer
  std::uint64_t in_place = 0;                           // its first bytes, where it belongs
};

class Transfer {
 public:
  static constexpr std::uint8_t kNoPace = 0xff;

  virtual ~Transfer() = default;

  Operation* operation = nullptr;  // whose part it is; null for a contribution
  std::span<const Part> parts;
  std::uint32_t next = 0;        // the first one that was not sent
  std::uint32_t unfinished = 0;  // were not sent, or not answered
  std::int32_t priority = 0;     // higher first
  Route route = Route::kStaged;
  Finality finality = Finality::kAnswer;
  std::uint8_t pace = kNoPace;    // which of the paces of its operation it keeps
  bool cancelled : 1 = false;     // nothing more is sent, and the server has been told
  std::uint8_t fetched_ : 7 = 0;  // the last bits of Portion::fetched(), which are here because a Portion has no room
  std::uint64_t sequence = 0;     // of equal priorities, the earlier one first
  const tensor::PushHeader* header = nullptr;  // of each push, but for what the sender adds
  // Encoding changes what is remembered of the tensor, and a GPU's copy takes time, so each is done once: partitions
  // that are encoded or copied, and not sent yet, wait here, the next one first.
  StagingBuffer* encoded = nullptr;
  // The bytes lie here. Their blocks are registered with the server's transport before the transfer enters the send
  // queue, and held until the last answer.
  const std::byte* input_bytes = nullptr;
  std::byte* output_bytes = nullptr;
  transport::RegionPtr input{};
  transport::RegionPtr output{};

  std::uint32_t unsent() const { return static_cast<std::uint32_t>(parts.size()) - next; }

  virtual tensor::Extent extent_of(const Part& part) const = 0;
  // Puts the payload into a staging buffer. Where its length depends on the values, fill() also says how long it is.
  // kCodec: see compress/codec_call.h.
  virtual Status fill(const Part& part, tensor::Extent& extent, std::byte* into, Counters& counters) = 0;
  // Takes the answer out of a staging buffer. kProtocol: no server that keeps the protocol sends this.
  virtual Status take_answer(const Part& part, const tensor::Extent& extent, const std::byte* from,
                             Counters& counters) = 0;

  // A partition in two phases will have no answer in this view; what has landed may be committed elsewhere. `failed`:
  // it is committed nowhere, because the server has failed its round, or never had this rank's part of it. True when
  // the next view has a use for what has landed.
  virtual bool suspend(std::uint32_t partition, const Landed& landed, bool failed) = 0;

  // Notes why it cannot complete; true for the first reason, which counts.
  virtual bool fail(ErrorCode code, const std::string& what, const std::string& hint) = 0;
  // Tells which ranks the server still waited for when it was cancelled.
  virtual void note_missing(const std::string& server, const std::vector<std::uint32_t>& ranks) = 0;
  // The message that its server is sent when it is cancelled, without the partitions.
  virtual tensor::Cancel make_cancel() const = 0;
  // Partitions are over; `answered` or not. With the last one it may vanish.
  virtual void finish(std::uint32_t count, bool answered, Counters& counters) = 0;
};

inline TraceKey trace_key(const Transfer& transfer, const Part& part) {
  const tensor::PushHeader& header = *transfer.header;
  return {header.group, header.tensor, header.round, part.partition, part.for_host()};
}

}  // namespace bps::worker
