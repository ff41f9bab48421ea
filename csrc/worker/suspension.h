// SPDX-License-Identifier: Apache-2.0
// Keeps what is left of an operation in two phases whose view has ended, and what the next view makes of that.
//
// Of a partition that has not been committed this rank has all of the result, or its first bytes, or nothing. Where the
// result has not landed, the input is as it was. The ranks exchange what is missing, and then the operation is
// complete, continued by another one, or aborted. docs/notes/members.md "When a server is lost" tells how. Any thread
// may call it; read(), write(), take_landed() and continue_by() belong to the one that goes into the next view. Once
// the caller has its arrays back take_landed() does nothing, and the others throw. Where the arrays are a GPU's the
// first three wait for its copies, and throw what device/blocking_copies.h says.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "worker/device_arrays.h"
#include "worker/partition_layout.h"
#include "worker/request.h"
#include "worker/tensor.h"
#include "worker/transfer.h"

namespace bps::worker {

class Operation;

// Names a partition of which this rank has the first bytes of the result, where they belong.
struct Begun {
  std::uint32_t partition;
  std::uint64_t bytes;
};

// Describes an operation that sums again what has not been committed in an earlier view: some partitions of a tensor.
class Continuation {
 public:
  // `only` has the partitions, in order, and how much has come of their results, which is not taken again.
  Continuation(const Plan& all, std::span<const Begun> only);
  const Plan& plan() const { return plan_; }
  std::uint64_t begun(std::uint32_t partition) const;

 private:
  const std::vector<Begun> begun_;
  Plan plan_;
};

// Says how an operation ends in the next view.
enum class Resumption : std::uint8_t {
  kNone,       // that is not known yet
  kContinued,  // by another operation
  kComplete,
  kAborted,  // the next view has other workers, or it has failed on another rank
};

class Suspension {
 public:
  // `on_device` is null for arrays in the host's memory. `continuation` may be null.
  Suspension(const PartitionLayout& layout, const Request& request, DeviceArrays* on_device,
             const Continuation* continuation)
      : layout_(layout), request_(request), on_device_(on_device), continuation_(continuation) {}

  // Adds a partition that has not been committed, and what has landed of it.
  void add(std::uint32_t partition, const Landed& landed);
  // Notes that a server has said that a partition has failed, for all ranks.
  void note_failed();
  bool has_failed() const;

  // List the partitions whose result this rank wants, in order, and how much of it has come: missing() those that it
  // lacks at least a part of, whole() those that it has. The ranks that want the other partitions decide about them.
  std::vector<Begun> missing() const { return wanted(false); }
  std::vector<Begun> whole() const { return wanted(true); }
  // Returns how much of the results of these partitions is where it belongs.
  std::vector<Begun> begun(std::span<const std::uint32_t> partitions) const;
  std::uint64_t length(std::uint32_t partition) const { return layout_.extent_of(partition).length; }
  // Copy the first bytes of a partition's result: read() for ranks that lack them, write() from a rank that has them.
  void read(std::uint32_t partition, std::span<std::byte> into) const;
  void write(std::uint32_t partition, std::span<const std::byte> from);
  // Copies the results that have landed in buffers to where they belong, and on a GPU the own part of an all_gather
  // that lies elsewhere. Ranks that lacked them have got them by then.
  void take_landed();

  // Lets another operation go on with it, which `launch` launches and returns.
  void continue_by(const std::function<std::shared_ptr<Operation>()>& launch);
  void resolve(Resumption how);
  // Leaves the arrays to the caller from now on, who waits no longer, except for what continues it already. Returns
  // when nobody copies from or to them.
  void withdraw();
  bool is_withdrawn() const { return is_withdrawn_.load(std::memory_order_acquire); }
  Resumption resumption() const;
  // Returns the operation that goes on with it, if it is continued.
  std::shared_ptr<Operation> continued_by() const;

 private:
  struct Unfinished {
    std::uint32_t partition;
    Landed landed;
  };
  std::vector<Begun> wanted(bool whole) const;
  std::uint64_t begun_before(std::uint32_t partition) const;
  std::vector<Unfinished> unfinished() const;
  std::optional<Landed> landed_of(std::uint32_t partition) const;
  [[nodiscard]] std::unique_lock<std::mutex> take_arrays() const;

  const PartitionLayout layout_;
  const Request& request_;
  DeviceArrays* const on_device_;
  const Continuation* const continuation_;
  mutable std::mutex in_use_;              // held while somebody uses the caller's arrays; before mutex_
  std::atomic<bool> is_withdrawn_{false};  // is set under in_use_
  mutable std::mutex mutex_;
  std::vector<Unfinished> unfinished_;
  bool has_failed_ = false;
  Resumption resumption_ = Resumption::kNone;
  std::shared_ptr<Operation> continued_by_;
};

// Copies a result to where it belongs, without its `first` bytes, which are there already.
void copy_result(const tensor::Extent& extent, std::uint64_t first, const std::byte* from, std::byte* output);

}  // namespace bps::worker
