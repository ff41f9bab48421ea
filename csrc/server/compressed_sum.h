// SPDX-License-Identifier: Apache-2.0
// Sums a round in which payloads came compressed: decodes them, adds in float32, and encodes the result once.
//
// Contributors on this host may have sent plain payloads. All members get the same numbers: what the code of the result
// says, also those that get it decoded. Members that have 16-bit floats round these. Sums run in the order of ranks,
// first over the plain payloads, then over the compressed ones. With error feedback this server remembers of each
// partition what its last result lost.
//
// One thread uses it. Errors: find() returns nullptr for what no worker sends, and sum() names the worker that sent
// what cannot be read. Memory: each partition with feedback has one residual, made with its first round and bounded by
// MemoryShares.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "compress/compression.h"
#include "compress/label.h"
#include "server/memory_shares.h"
#include "server/round_table.h"
#include "server/sum.h"

namespace bps::server {

class CompressedSummer {
 public:
  // `shares` counts the residuals, and must outlive this.
  explicit CompressedSummer(MemoryShares& shares) : shares_(shares) {}

  // Returns what a label means, or nullptr when it means nothing here. The same label has the same object.
  const compress::Compression* find(const compress::Label& label);

  // Holds, until the next call, the result for members that get plain values, and its code.
  struct Result {
    const std::byte* values = nullptr;
    const std::byte* code = nullptr;
  };
  // The code of the result goes to `code`, for answers that travel from there; null means scratch memory. A worker
  // whose payload cannot be read is named in `broken`. compress/codec_call.h explains kCodec. May throw std::bad_alloc,
  // before anything has changed.
  Status sum(const Round& round, Summer& summer, SumPlan& plan, std::byte* code, Result& result,
             WorkerSession*& broken);
  // Forgets what the partition's last result has lost, because the round has failed. Workers do the same.
  void forget(const Round& round);

  // Returns what this partition's last result has lost, which is added to the next one. It is zeros before the first
  // result. May throw std::bad_alloc.
  std::vector<float>& residual_of(const Round& round, std::size_t count);

 private:
  static Status read(const Arrival& arrival, std::size_t bytes, std::span<const std::byte>& payload);
  static Status decode_pushes(const Round& round, std::span<float> sum, compress::Into into, WorkerSession*& broken);

  static constexpr std::size_t kMostTexts = 4096;  // labels that members can make a server remember
  std::unordered_map<std::string, std::shared_ptr<const compress::Compression>> known_;
  const compress::Compression* latest_ = nullptr;  // most pushes name the same one as the push before
  MemoryShares& shares_;
  std::unordered_map<RoundKey, std::vector<float>, RoundKeyHash> residuals_;
};

}  // namespace bps::server
