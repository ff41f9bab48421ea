// SPDX-License-Identifier: Apache-2.0
#include "server/sum.h"

#include <algorithm>
#include <cstring>

#include "server/reduce.h"

namespace bps::server {
namespace {

// Blocks of two sources and one result fit into 1 MiB of second-level cache together, and copying a block between
// processes takes much longer than the system call that it needs.
constexpr std::uint64_t kBlock = 128 * 1024;

}  // namespace

std::byte* Summer::scratch(std::size_t index) {
  while (scratch_.size() <= index) scratch_.emplace_back(kBlock);
  return scratch_[index].data();
}

Status Summer::sum(const Reduction& what, std::uint64_t length, const SumPlan& plan, WorkerSession*& broken) {
  const auto& [sources, targets] = plan;
  const bool must_put = std::any_of(targets.begin(), targets.end(), [](const SumMemory& t) { return !t.bytes; });
  in_.resize(sources.size());
  for (std::uint64_t at = 0; at < length; at += kBlock) {
    const std::uint64_t size = std::min(kBlock, length - at);
    std::size_t used = 0;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const SumMemory& source = sources[i];
      if (source.bytes != nullptr && !source.divide) {
        in_[i] = source.bytes + at;
        continue;
      }
      std::byte* block = scratch(used++);
      in_[i] = block;
      if (source.bytes != nullptr) {
        std::memcpy(block, source.bytes + at, size);
      } else if (const Status status = source.direct->get({source.span.key, source.span.address + at, size}, block);
                 status != Status::kOk) {
        broken = source.session;
        return status;
      }
      if (source.divide) {
        reduce({what.dtype, ReduceOp::kAverage, what.divisor}, {&in_[i], 1}, {&block, 1}, size / size_of(what.dtype));
      }
    }
    out_.clear();
    for (const SumMemory& target : targets) {
      if (target.bytes != nullptr) out_.push_back(target.bytes + at);
    }
    const std::byte* result = nullptr;
    if (must_put) {
      if (out_.empty()) out_.push_back(used > 0 ? scratch(0) : scratch(used));
      result = out_.front();
    }
    reduce(what, in_, out_, size / size_of(what.dtype));
    for (const SumMemory& target : targets) {
      if (target.bytes != nullptr) continue;
      if (const Status status = target.direct->put({target.span.key, target.span.address + at, size}, result);
          status != Status::kOk) {
        broken = target.session;
        return status;
      }
    }
  }
  return Status::kOk;
}

}  // namespace bps::server
