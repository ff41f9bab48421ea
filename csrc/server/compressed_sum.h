// SPDX-License-Identifier: Apache-2.0
// Sums a round in which payloads came compressed: decodes them, adds in float32, and encodes the result once.
//
// Contributors on this host may have sent theirs as they are. Everybody gets the same numbers: what the code of the
// result says, also those who get it decoded. Members that have 16-bit floats round that. The order is that of the
// ranks, first those that came as they are, then those that came compressed. With error feedback this server remembers
// of each partition what its last result lost.
//
// Threading: one thread. Errors: find() answers nullptr for what no worker sends; sum() says who sent what cannot be
// read. Memory: one residual per partition with feedback, made with its first round, and bounded by MemoryShares.
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
  // `shares`: what residuals are counted by. It must outlive this.
  explicit CompressedSummer(MemoryShares& shares) : shares_(shares) {}

  // The meaning of a label; nullptr when it means nothing here. The same label has the same object.
  const compress::Compression* find(const compress::Label& label);

  // Until the next call: the result for those who take it as it is, and its code.
  struct Result {
    const std::byte* values = nullptr;
    const std::byte* code = nullptr;
  };
  // `code`: where the code of the result goes, for answers that travel from there; null for scratch memory. A worker
  // whose payload cannot be read is named in `broken`. kCodec: see compress/codec_call.h. May throw std::bad_alloc,
  // before anything has changed.
  Status sum(const Round& round, Summer& summer, SumPlan& plan, std::byte* code, Result& result,
             WorkerSession*& broken);
  // The round has failed: workers forget what the partition's last result has lost, and so does this server.
  void forget(const Round& round);

  // The loss of this partition's last result, which is added to the next one; zeros before the first one. May throw
  // std::bad_alloc.
  std::vector<float>& residual_of(const Round& round, std::size_t count);

 private:
  static Status read(const Arrival& arrival, std::size_t bytes, std::span<const std::byte>& payload);
  static Status decode_pushes(const Round& round, std::span<float> sum, compress::Into into, WorkerSession*& broken);

  static constexpr std::size_t kMostTexts = 4096;  // that members can make a server remember
  std::unordered_map<std::string, std::shared_ptr<const compress::Compression>> known_;
  const compress::Compression* latest_ = nullptr;  // most pushes name the same one as the push before
  MemoryShares& shares_;
  std::unordered_map<RoundKey, std::vector<float>, RoundKeyHash> residuals_;
};

}  // namespace bps::server
