// SPDX-License-Identifier: Apache-2.0
// A Portion sends one place the partitions of an operation, and belongs to one worker loop. It is the first of the two
// kinds of Transfer.
#pragma once

#include "worker/transfer.h"

namespace bps::worker {

class Portion final : public Transfer {
 public:
  // Returns, where a device copies, how many partitions have been copied from the device or are being copied. They are
  // at most 127 more than were sent.
  std::uint32_t fetched() const { return next + ((fetched_ - next) & 0x7f); }
  void note_fetched() { fetched_ = (fetched_ + 1) & 0x7f; }
  inline tensor::Extent extent_of(const Part& part) const override;
  Status fill(const Part& part, tensor::Extent& extent, std::byte* into, Counters& counters) override;
  Status take_answer(const Part& part, const tensor::Extent& extent, const std::byte* from,
                     Counters& counters) override;
  bool fail(ErrorCode code, const std::string& what, const std::string& hint) override;
  void note_missing(const std::string& server, const std::vector<std::uint32_t>& ranks) override;
  tensor::Cancel make_cancel() const override;
  // Encodes the elements at `from`, which are those of the partition: what a device has copied, or the caller's own.
  Status encode(const Part& part, const tensor::Extent& extent, const std::byte* from, std::byte* into,
                Counters& counters);
  bool suspend(std::uint32_t partition, const Landed& landed, bool failed) override;
  void finish(std::uint32_t count, bool answered, Counters& counters) override;

  // Makes all its partitions unsent, for a start of the operation. Returns how many there are.
  std::uint64_t restart(std::uint64_t order);

 private:
  // Returns true when a server, or a NIC, may have written to the caller's memory, and that is not a GPU's.
  bool lies_in_place() const { return route == Route::kInPlace || route == Route::kStagedIfCheap; }
  void release_memory();
  void show_to_device();
};

}  // namespace bps::worker
