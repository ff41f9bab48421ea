// SPDX-License-Identifier: Apache-2.0
// What must hold of a program's memory and results.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace bps::sim {
namespace {

constexpr std::uint64_t kElement = 4;

}  // namespace

void Program::Block::make(std::uint64_t size, std::uint64_t number) {
  bytes.assign(size + 2 * kMargin, std::byte{0xee});
  returned.clear();
  identity = number;
}

void Program::Block::check_margin() const {
  const auto is_untouched = [](std::byte one) { return one == std::byte{0xee}; };
  if (!std::all_of(bytes.begin(), bytes.begin() + kMargin, is_untouched) ||
      !std::all_of(bytes.end() - kMargin, bytes.end(), is_untouched)) {
    throw Violation("a byte beside the caller's memory has changed");
  }
}

std::uint32_t Program::contribution(std::uint64_t identity, std::size_t tensor, std::uint32_t round,
                                    std::uint64_t element) const {
  const std::uint64_t first = mix(mix(identity * 1000 + tensor) ^ (std::uint64_t{era_} << 32 | round));
  return static_cast<std::uint32_t>(first + element * ((first >> 40) | 1));
}

bool Program::has_one_block(std::size_t tensor) const {
  const TensorShape& shape = shape_.tensors[tensor];
  return shape.kind == tensor::OperationKind::kBroadcast ||
         (shape.kind == tensor::OperationKind::kPushPull && shape.in_place);
}

void Program::check_result(std::size_t which) {
  Call& call = calls_[which];
  const worker::Tensor& tensor = *call.operation->tensor;
  const tensor::OperationKind kind = shape_.tensors[which].kind;
  const auto expected = [&](std::uint64_t element) {
    if (kind == tensor::OperationKind::kBroadcast) {
      return contribution(members_[call.round % members_.size()], which, call.round, element);
    }
    if (kind == tensor::OperationKind::kAllGather) {
      for (std::uint32_t rank = 0; rank < members_.size(); ++rank) {
        const std::uint64_t begin = tensor.sharded.shard_offset(rank) / kElement;
        if (element >= begin && element - begin < tensor.sharded.shard_length(rank) / kElement) {
          return contribution(members_[rank], which, call.round, element);
        }
      }
    }
    std::uint32_t sum = 0;
    for (const std::uint64_t identity : members_) sum += contribution(identity, which, call.round, element);
    return sum;
  };
  Block& output = has_one_block(which) ? call.input : call.output;
  const std::uint64_t from =
      kind == tensor::OperationKind::kReduceScatter ? tensor.sharded.shard_offset(rank_) / kElement : 0;
  for (std::uint64_t i = 0; i < (output.bytes.size() - 2 * Block::kMargin) / kElement; ++i) {
    // The own shard of an all_gather is the caller's to put there.
    if (kind == tensor::OperationKind::kAllGather && !has_one_block(which)) {
      const std::uint64_t begin = tensor.sharded.shard_offset(rank_) / kElement;
      if (i >= begin && i - begin < tensor.sharded.shard_length(rank_) / kElement) continue;
    }
    std::uint32_t value = 0;
    std::memcpy(&value, output.data() + i * kElement, kElement);
    if (value != expected(from + i)) {
      throw Violation("a wrong result: " + tensor.name + ", round " + std::to_string(call.round) + ", element " +
                      std::to_string(from + i) + ", on the rank of process " + std::to_string(identity_));
    }
  }
  if (has_one_block(which)) return;
  for (std::uint64_t i = 0; i < (call.input.bytes.size() - 2 * Block::kMargin) / kElement; ++i) {
    const std::uint64_t begin =
        kind == tensor::OperationKind::kAllGather ? tensor.sharded.shard_offset(rank_) / kElement : 0;
    std::uint32_t value = 0;
    std::memcpy(&value, call.input.data() + i * kElement, kElement);
    if (value != contribution(identity_, which, call.round, begin + i)) throw Violation("an input has changed");
  }
}

void Program::check_returned() const {
  const auto check = [this](const Call& call) {
    for (const Block* block : {&call.input, &call.output}) {
      if (block->returned.empty() || block->returned == block->bytes) continue;
      throw Violation("memory of process " + std::to_string(identity_) + " has changed after the call had ended");
    }
  };
  std::ranges::for_each(calls_, check);
  check(exchange_);
}

}  // namespace bps::sim
