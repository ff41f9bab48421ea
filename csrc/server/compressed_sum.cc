// SPDX-License-Identifier: Apache-2.0
#include "server/compressed_sum.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "compress/codec_call.h"
#include "compress/elements.h"
#include "compress/error_feedback.h"
#include "compress/scratch.h"
#include "server/reduce.h"
#include "server/worker_session.h"

namespace bps::server {

const compress::Compression* CompressedSummer::find(const compress::Label& label) {
  const std::string_view text = compress::read_label(label);
  if (latest_ != nullptr && latest_->text == text) return latest_;
  try {
    const std::string key(text);
    const auto found = known_.find(key);
    if (found != known_.end()) return latest_ = found->second.get();
    if (known_.size() >= kMostTexts) return nullptr;
    return latest_ = known_.emplace(key, compress::parse_compression(text)).first->second.get();
  } catch (const std::exception&) {  // the label means nothing, or there is no memory
    return nullptr;
  }
}

// Finds the payload where it lies, or copies it.
Status CompressedSummer::read(const Arrival& arrival, std::size_t bytes, std::span<const std::byte>& payload) {
  const std::byte* at = nullptr;
  if (arrival.slot != nullptr) {
    at = arrival.slot->payload();
  } else if (at = arrival.data->direct()->map(arrival.span); at == nullptr) {
    const auto copy = std::as_writable_bytes(compress::scratch(compress::Scratch::kCode, bytes / sizeof(float) + 1));
    const transport::RemoteSpan whole{arrival.span.key, arrival.span.address, bytes};
    if (const Status status = arrival.data->direct()->get(whole, copy.data()); status != Status::kOk) return status;
    at = copy.data();
  }
  payload = {at + compress::kLabelBytes, bytes - compress::kLabelBytes};
  return Status::kOk;
}

// Returns the residual of a partition. The key names the group's tensor, whose partitions keep their size.
std::vector<float>& CompressedSummer::residual_of(const Round& round, std::size_t count) {
  const auto found = residuals_.find(round.key);
  if (found != residuals_.end() && found->second.size() == count) return found->second;
  forget(round);
  std::vector<float> made(count);
  std::vector<float>& residual = residuals_[round.key];
  if (!shares_.take(round.group->group.ranks, count * sizeof(float))) {
    residuals_.erase(round.key);
    throw std::bad_alloc();
  }
  residual = std::move(made);
  return residual;
}

void CompressedSummer::forget(const Round& round) {
  const auto found = residuals_.find(round.key);
  if (found == residuals_.end()) return;
  shares_.give_back(round.group->group.ranks, found->second.size() * sizeof(float));
  residuals_.erase(found);
}

// Puts the sum of all compressed payloads into `sum`, or adds it.
Status CompressedSummer::decode_pushes(const Round& round, std::span<float> sum, compress::Into into,
                                       WorkerSession*& broken) {
  const compress::Codec& codec = *round.compression->codec;
  const std::size_t bytes = compress::kLabelBytes + codec.encoded_size(sum.size());
  for (const Arrival& arrival : round.arrivals) {
    if (!arrival.is_compressed()) continue;
    std::span<const std::byte> payload;
    const Status status = read(arrival, bytes, payload);
    const auto decoded = status == Status::kOk ? codec.decode(payload, sum, into) : compress::Decoded::kOk;
    if (decoded == compress::Decoded::kFailed) return Status::kCodec;
    if (status != Status::kOk || decoded != compress::Decoded::kOk) {
      broken = arrival.session;
      return status == Status::kOk ? Status::kProtocol : status;
    }
    into = compress::Into::kAdd;
  }
  return Status::kOk;
}

namespace {

// Sums the payloads that came as they are, in float32.
Status sum_plain(Dtype dtype, std::uint32_t members, Summer& summer, SumPlan& plan, std::span<float> sum,
                 WorkerSession*& broken) {
  const Reduction what{dtype, ReduceOp::kSum, members};
  if (dtype != Dtype::kFloat32) return summer.sum_as_float32(what, plan, sum, broken);
  plan.targets.assign(1, {.bytes = reinterpret_cast<std::byte*>(sum.data())});
  return summer.sum(what, sum.size_bytes(), plan, broken);
}

// Returns the result, rounded as members round it that get its code. It is valid until the next call.
const std::byte* as_tensors_have_it(Dtype dtype, std::span<const float> result) {
  if (dtype == Dtype::kFloat32) return reinterpret_cast<const std::byte*>(result.data());
  const std::span<float> room = compress::scratch(compress::Scratch::kCode, result.size());
  const std::span<std::byte> rounded = std::as_writable_bytes(room);
  compress::narrow(dtype, result, rounded.data());
  return rounded.data();
}

}  // namespace

Status CompressedSummer::sum(const Round& round, Summer& summer, SumPlan& plan, std::byte* code, Result& result,
                             WorkerSession*& broken) {
  const compress::Compression& compression = *round.compression;
  const Dtype dtype = round.first.dtype;
  const std::size_t count = round.elements();
  const std::size_t encoded = compression.codec->encoded_size(count);
  const std::span<float> sum = compress::scratch(compress::Scratch::kSum, count);
  auto* const bytes = reinterpret_cast<std::byte*>(sum.data());
  std::vector<float>* const residual = compression.feedback ? &residual_of(round, count) : nullptr;
  // Comes before any payload is read, because that may use the same memory.
  if (code == nullptr)
    code = std::as_writable_bytes(compress::scratch(compress::Scratch::kValues, encoded / 4 + 1)).data();

  plan.read_from(round);
  const std::uint32_t members = round.group->group.size();
  if (!plan.sources.empty()) {
    if (const Status status = sum_plain(dtype, members, summer, plan, sum, broken); status != Status::kOk) {
      return status;
    }
  }
  const auto into = plan.sources.empty() ? compress::Into::kReplace : compress::Into::kAdd;
  if (const Status status = decode_pushes(round, sum, into, broken); status != Status::kOk) return status;
  if (round.first.op == ReduceOp::kAverage) {
    const std::byte* const source = bytes;
    reduce({Dtype::kFloat32, ReduceOp::kAverage, members}, {&source, 1}, {&bytes, 1}, count);
  }

  constexpr std::uint32_t kServer = ~std::uint32_t{0};
  const std::uint64_t seed =
      compression.seed ^ compress::seed_of(round.key.tensor, round.key.partition, round.number, kServer);
  const std::span<std::byte> to(code, encoded);
  if (residual != nullptr) {
    compress::encode_with_feedback(*compression.codec, sum, *residual, to, seed);
  } else {
    compression.codec->encode(sum, to, seed);
  }
  const bool as_it_is =
      std::ranges::any_of(round.arrivals, [](const Arrival& one) { return one.wants_data() && !one.is_compressed(); });
  // A codec accepts what it has just written.
  if (as_it_is) static_cast<void>(compression.codec->decode(to, sum, compress::Into::kReplace));
  if (!compression.codec->is_built_in() && compress::CodecCall::has_failed()) return Status::kCodec;
  result = {as_it_is ? as_tensors_have_it(dtype, sum) : nullptr, code};
  return Status::kOk;
}

}  // namespace bps::server
