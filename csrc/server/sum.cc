// SPDX-License-Identifier: Apache-2.0
#include "server/sum.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "compress/elements.h"
#include "server/integer_mean.h"
#include "server/reduce.h"

namespace bps::server {
namespace {

// Blocks of two sources and one result fit into 1 MiB of second-level cache together, and copying a block between
// processes takes much longer than the system call that it needs.
constexpr std::uint64_t kBlock = 128 * 1024;
static_assert(kBlock <= tensor::RedoLog::kBlock);
// With a redo log a block is written once more than there are targets. It stays in the second-level cache meanwhile,
// with the sources, so that this costs no traffic with the memory.
constexpr std::uint64_t kLoggedBlock = 16 * 1024;

}  // namespace

std::byte* Summer::scratch(std::size_t index) {
  while (scratch_.size() <= index) scratch_.emplace_back(kBlock);
  return scratch_[index].data();
}

// Reads the sums of hosts as a whole, because the parts that do not fit a float64 lie behind all elements.
Status Summer::begin_exact(const Reduction& what, std::uint64_t elements, const SumPlan& plan, WorkerSession*& broken,
                           tensor::UnroundedWriter* unrounded) {
  exact_.begin(what, unrounded);
  std::size_t copied = 0;
  for (const SumMemory& source : plan.sources) {
    if (!source.unrounded) {
      exact_.add_plain();
      continue;
    }
    const std::byte* from = source.bytes;
    const std::uint64_t room = source.span.length;
    Status status = Status::kOk;
    if (from == nullptr) {
      if (copies_.size() == copied) copies_.emplace_back();
      std::vector<std::byte>& copy = copies_[copied++];
      copy.resize(room);
      status = source.direct->get(source.span, copy.data());
      from = copy.data();
    }
    const std::uint64_t bytes = room < tensor::kUnroundedHeader ? 0 : tensor::unrounded_bytes(from, elements);
    if (status == Status::kOk && (bytes == 0 || bytes > room)) status = Status::kProtocol;
    if (status != Status::kOk) {
      broken = source.session;
      return status;
    }
    exact_.add_unrounded({{from, bytes}, elements});
  }
  return Status::kOk;
}

// Makes in_ point to one block of each source, `used` of which are copies. It is a part of sum(), which calls it per
// partition.
[[gnu::always_inline]] inline Status Summer::read(const Reduction& what, const SumPlan& plan, std::uint64_t at,
                                                  std::uint64_t size, std::size_t& used, WorkerSession*& broken) {
  in_.resize(plan.sources.size());
  for (std::size_t i = 0; i < plan.sources.size(); ++i) {
    const SumMemory& source = plan.sources[i];
    if (source.unrounded) continue;
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
  return Status::kOk;
}

Status Summer::check_fit(Dtype dtype, std::uint64_t length, const SumPlan& plan, WorkerSession*& broken) try {
  for (std::uint64_t at = 0; at < length; at += kBlock) {
    const std::uint64_t size = std::min(kBlock, length - at);
    std::size_t used = 0;
    const Status status = read({dtype, ReduceOp::kSum, 1}, plan, at, size, used, broken);
    if (status != Status::kOk) return status;
    if (!fits_integers(dtype, in_, size / size_of(dtype))) return Status::kOverflow;
  }
  return Status::kOk;
} catch (const std::bad_alloc&) {
  return Status::kNoMemory;
}

// To multiply what a host has averaged brings its sum back: a float16 times the number of ranks is exact.
Status Summer::sum_as_float32(const Reduction& what, const SumPlan& plan, std::span<float> sum,
                              WorkerSession*& broken) try {
  constexpr std::size_t kFloats = kBlock / sizeof(float);
  const std::size_t element = size_of(what.dtype);
  widened_.resize(kFloats);
  for (std::size_t at = 0; at < sum.size(); at += kFloats) {
    const std::span<float> block = sum.subspan(at, std::min(kFloats, sum.size() - at));
    const std::span<float> one = std::span(widened_).first(block.size());
    std::size_t used = 0;
    const Status status = read(what, plan, at * element, block.size() * element, used, broken);
    if (status != Status::kOk) return status;
    std::ranges::fill(block, -0.0F);  // a sum of nothing but -0 is added to it
    for (std::size_t i = 0; i < plan.sources.size(); ++i) {
      if (!plan.sources[i].averaged) {
        compress::widen(what.dtype, in_[i], block, compress::Into::kAdd);
        continue;
      }
      compress::widen(what.dtype, in_[i], one);
      for (std::size_t k = 0; k < block.size(); ++k) block[k] += one[k] * static_cast<float>(what.divisor);
    }
  }
  return Status::kOk;
} catch (const std::bad_alloc&) {
  return Status::kNoMemory;
}

// Memory is taken for the first block, before it is written, or for no block.
Status Summer::sum(const Reduction& what, std::uint64_t length, const SumPlan& plan, WorkerSession*& broken,
                   tensor::UnroundedWriter* unrounded) try {
  const std::vector<SumMemory>& targets = plan.targets;
  const std::size_t element = size_of(what.dtype);
  const bool exact = is_exact(what.op);
  if (exact) {
    const Status status = begin_exact(what, length / element, plan, broken, unrounded);
    if (status != Status::kOk) return status;
  }
  const bool must_put = std::any_of(targets.begin(), targets.end(), [](const SumMemory& t) { return !t.bytes; });
  const std::uint64_t block_size = plan.log == nullptr || must_put ? kBlock : kLoggedBlock;
  for (std::uint64_t at = 0; at < length; at += block_size) {
    const std::uint64_t size = std::min(block_size, length - at);
    std::size_t used = 0;
    if (const Status status = read(what, plan, at, size, used, broken); status != Status::kOk) return status;
    out_.clear();
    for (const SumMemory& target : targets) {
      if (target.bytes != nullptr) out_.push_back(target.bytes + at);
    }
    if (plan.log != nullptr) {
      logged_.swap(out_);
      out_.assign(1, plan.log->begin());
    } else if (must_put && out_.empty()) {
      out_.push_back(used > 0 ? scratch(0) : scratch(used));
    }
    const std::byte* result = must_put ? out_.front() : nullptr;
    if (unrounded != nullptr) out_.assign(1, unrounded->sums() + at / element * sizeof(double));
    if (exact) {
      exact_.sum(at / element, size / element, in_, out_);
    } else {
      reduce(what, in_, out_, size / element);
    }
    if (plan.log != nullptr) {
      plan.log->publish(plan.key, at, size);
      for (std::byte* out : logged_) std::memcpy(out, out_.front(), size);
    }
    for (const SumMemory& target : targets) {
      if (target.bytes != nullptr) continue;
      if (const Status status = target.direct->put({target.span.key, target.span.address + at, size}, result);
          status != Status::kOk) {
        broken = target.session;
        return status;
      }
    }
  }
  if (unrounded != nullptr) unrounded->finish();
  return Status::kOk;
} catch (const std::exception&) {  // std::bad_alloc, or std::length_error
  return Status::kNoMemory;
}

}  // namespace bps::server
