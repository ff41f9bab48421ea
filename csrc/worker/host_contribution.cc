// SPDX-License-Identifier: Apache-2.0
#include "worker/host_contribution.h"

#include <utility>

#include "compress/scratch.h"
#include "tensor/unrounded.h"

namespace bps::worker {

void HostContribution::compress(const std::shared_ptr<const Tensor>& tensor) {
  tensor_ = tensor;
  route = Route::kEncoded;
}

tensor::Extent HostContribution::extent_of(const Part&) const {
  tensor::Extent extent{.length = header_.length, .flags = header_.flags};
  extent.encoded = unrounded_bytes_;
  if (tensor_) tensor_->compressor->apply(extent);
  return extent;
}

Status HostContribution::fill(const Part& part, tensor::Extent& extent, std::byte* into, Counters& counters) {
  if (pool_->source() == nullptr) return Status::kPeerLost;
  if (unrounded_bytes_ > 0) {
    if (const Status status = pool_->source()->sum(number_, header_.dtype, into); status != Status::kOk) return status;
    const std::uint64_t elements = header_.length / size_of(header_.dtype);
    // This is the length of what is sent now. It may be made again, and be longer.
    extent.encoded = tensor::unrounded_bytes(into, elements);
    return Status::kOk;
  }
  if (!extent.is_compressed()) return pool_->source()->sum(number_, header_.dtype, into);
  constexpr Dtype kAs = Dtype::kFloat32;  // of 16-bit floats too: their sum is not rounded to their type
  const std::size_t elements = header_.length / size_of(header_.dtype);
  const auto sum = std::as_writable_bytes(compress::scratch(compress::Scratch::kSum, elements));
  if (const Status status = pool_->source()->sum(number_, kAs, sum.data()); status != Status::kOk) return status;
  const std::uint64_t offset = tensor_->cut(header_.kind).piece(part.partition).offset;
  const std::uint64_t seed = compress::seed_of(header_.tensor, part.partition, header_.round, header_.position);
  return tensor_->compressor->encode(part.partition, offset, extent, sum.data(), kAs, into, seed, counters);
}

Status HostContribution::take_answer(const Part&, const tensor::Extent& extent, const std::byte* from,
                                     Counters& counters) {
  if (number_ == HostContributions::kNobody || pool_->source() == nullptr) return Status::kOk;
  const std::byte* result = from;
  if (extent.is_compressed()) {
    const std::size_t floats = header_.length / sizeof(float) + 1;
    const auto sum = std::as_writable_bytes(compress::scratch(compress::Scratch::kSum, floats));
    // The buffer holds what was sent if there is no answer, and nobody looks at the result.
    if (extent.wants_data()) {
      const Status decoded = tensor_->compressor->decode(extent, from, sum.data(), counters);
      if (decoded != Status::kOk) return decoded;
    }
    result = sum.data();
  }
  pool_->source()->deliver(number_, result);
  delivered_ = true;
  return Status::kOk;
}

void HostContribution::land(std::uint32_t immediate, const std::byte* result) {
  immediate_ = immediate;
  if (number_ != HostContributions::kNobody && pool_->source() != nullptr) pool_->source()->propose(number_, result);
}

bool HostContribution::fail(ErrorCode code, const std::string& what, const std::string& hint) {
  if (failure_) return false;
  failure_.emplace(code, what, hint);
  return true;
}

// The text names no operation, since ranks know that it is about the one for which they wait.
tensor::Cancel HostContribution::make_cancel() const {
  tensor::Cancel message;
  message.group = header_.group;
  message.tensor = header_.tensor;
  message.round = header_.round;
  message.code = failure_->code();
  message.what = failure_->what();
  message.hint = failure_->hint();
  return message;
}

void HostContribution::finish(std::uint32_t count, bool, Counters&) {
  unfinished -= count;
  if (unfinished > 0) return;
  tensor::ContributionSource* source = pool_->source();
  if (delivered_ || number_ == HostContributions::kNobody || source == nullptr) return pool_->free(*this);
  const std::uint32_t number = number_;
  if (is_undecided_ && pool_->view_ended_) failure_ = pool_->view_ended_;
  const Error why = failure_.value_or(
      Error(ErrorCode::kInternal, "a host's contribution ended without a reason", "report this as a bug"));
  const std::vector<std::uint32_t> missing = std::move(missing_);
  pool_->free(*this);  // comes first: what follows may contribute again
  source->fail(number, why, missing);
}

HostContribution& HostContributions::make(std::uint32_t number, const tensor::PushHeader& header, std::int32_t priority,
                                          ServerConnection& server) {
  if (free_.empty()) {
    free_.reserve(all_.size() + 1);
    free_.push_back(&all_.emplace_back());
  }
  HostContribution& made = *free_.back();
  free_.pop_back();
  made.pool_ = this;
  made.server = &server;
  made.number_ = number;
  made.header_ = header;
  made.header = &made.header_;
  if ((header.flags & tensor::kUnrounded) != 0) {
    made.unrounded_bytes_ = tensor::most_unrounded_bytes(header.dtype, header.length / size_of(header.dtype));
  }
  made.part_ = {.partition = header.partition};
  made.parts = {&made.part_, 1};
  made.unfinished = 1;
  made.priority = priority;
  made.sequence = made_++;
  if ((header.flags & tensor::kTwoPhase) != 0) made.finality = Finality::kCommit;
  if (number != kNobody) {
    if (by_number_.size() <= number) by_number_.resize(number + 1);
    by_number_[number] = &made;
  }
  return made;
}

HostContribution* HostContributions::find(std::uint32_t number) const {
  return number < by_number_.size() ? by_number_[number] : nullptr;
}

std::vector<HostContribution*> HostContributions::to(const ServerConnection& server) {
  std::vector<HostContribution*> found;
  for (HostContribution& one : all_) {
    if (one.server == &server) found.push_back(&one);
  }
  return found;
}

void HostContributions::free(HostContribution& contribution) {
  if (contribution.number_ != kNobody) by_number_[contribution.number_] = nullptr;
  contribution = HostContribution();
  free_.push_back(&contribution);
}

}  // namespace bps::worker
