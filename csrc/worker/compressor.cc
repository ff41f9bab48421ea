// SPDX-License-Identifier: Apache-2.0
#include "worker/compressor.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "compress/codec_call.h"
#include "compress/error_feedback.h"
#include "compress/float_bits.h"
#include "compress/scratch.h"

namespace bps::worker {
namespace {

// Returns true when codecs can read and write the elements where they lie.
bool is_float32(const std::byte* at, Dtype dtype) {
  return dtype == Dtype::kFloat32 && reinterpret_cast<std::uintptr_t>(at) % alignof(float) == 0;
}

// Nesterov momentum before what is sent is encoded: m = mu * m + g, and g + mu * m is sent (Sutskever et al., "On the
// importance of initialization and momentum in deep learning", 2013, as BytePS applies it). Momentum that is not finite
// is set to zero once it has been sent: a round that overflows spoils no later one.
void add_momentum(float mu, float* momentum, std::span<float> gradient) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    momentum[i] = mu * momentum[i] + gradient[i];
    gradient[i] += mu * momentum[i];
    momentum[i] = compress::finite(momentum[i]) ? momentum[i] : 0.0F;
  }
}

}  // namespace

Compressor::Memory Compressor::zeros(std::uint64_t elements) {
  auto* memory = static_cast<float*>(std::calloc(std::max<std::uint64_t>(elements, 1), sizeof(float)));
  if (memory == nullptr) throw std::bad_alloc();
  return Memory(memory);
}

Compressor::Compressor(std::shared_ptr<const compress::Compression> compression, Dtype dtype, std::uint64_t elements,
                       const tensor::Partitioning& whole, std::uint64_t partitions)
    : compression_(std::move(compression)),
      label_(compress::make_label(compression_->text)),
      dtype_(dtype),
      element_bytes_(size_of(dtype)),
      largest_(whole.count() > 0 ? whole.piece(0).length : 0),
      shortens_(largest_ > 0 && is_shorter(largest_)),
      failures_seen_(partitions) {
  if (compression_->feedback) residual_ = zeros(elements);
  if (compression_->momentum != 0) momentum_ = zeros(elements);
}

void Compressor::make_scratch() const {
  if (shortens_ && (dtype_ != Dtype::kFloat32 || momentum_)) {
    (void)compress::scratch(compress::Scratch::kValues, elements_of(largest_));
  }
}

bool Compressor::bind(tensor::OperationKind kind) {
  std::uint8_t bound = kUnbound;
  const auto wanted = static_cast<std::uint8_t>(kind);
  return bound_.compare_exchange_strong(bound, wanted) || bound == wanted;
}

void Compressor::forget_failed(std::uint64_t partition, std::uint64_t first, std::size_t count) {
  const std::uint32_t failures = failures_.load(std::memory_order_relaxed);
  if (std::exchange(failures_seen_[partition], failures) != failures) forget(first, count);
}

void Compressor::forget(std::uint64_t first, std::size_t count) {
  if (residual_) std::fill_n(residual_.get() + first, count, 0.0F);
  if (momentum_) std::fill_n(momentum_.get() + first, count, 0.0F);
}

Compressor::Remembered Compressor::remembered(const tensor::Partitioning& cut) {
  std::size_t elements = 0;
  for (std::uint64_t partition = 0; partition < cut.count(); ++partition) {
    const tensor::Partitioning::Piece piece = cut.piece(partition);
    const std::size_t count = elements_of(piece.length);
    forget_failed(partition, elements_of(piece.offset), count);
    elements += count;
  }
  Remembered all;
  if (residual_) all.residual = {residual_.get(), elements};
  if (momentum_) all.momentum = {momentum_.get(), elements};
  return all;
}

Status Compressor::encode(std::uint64_t partition, std::uint64_t offset, const tensor::Extent& extent,
                          const std::byte* from, Dtype as, std::byte* into, std::uint64_t seed, Counters& counters) {
  const std::size_t count = elements_of(extent.length);
  const std::uint64_t first = elements_of(offset);
  std::memcpy(into, label_.data(), label_.size());
  const std::span<std::byte> code(into + label_.size(), extent.encoded);
  forget_failed(partition, first, count);

  std::span<const float> values(reinterpret_cast<const float*>(from), count);
  if (!is_float32(from, as) || momentum_) {
    const std::span<float> changed = compress::scratch(compress::Scratch::kValues, count);
    compress::widen(as, from, changed);
    if (momentum_) add_momentum(compression_->momentum, momentum_.get() + first, changed);
    values = changed;
  }
  if (residual_) {
    compress::encode_with_feedback(*compression_->codec, values, {residual_.get() + first, count}, code,
                                   compression_->seed ^ seed);
  } else {
    compression_->codec->encode(values, code, compression_->seed ^ seed);
  }
  if (!compression_->codec->is_built_in() && compress::CodecCall::has_failed()) {
    // What is remembered is set to zero here, as nothing else would if another loop has failed the operation before.
    forget(first, count);
    return Status::kCodec;
  }
  counters.compressed_bytes.add(extent.payload_bytes());
  counters.uncompressed_bytes.add(extent.length);
  return Status::kOk;
}

Status Compressor::decode(const tensor::Extent& extent, const std::byte* from, std::byte* into,
                          Counters& counters) const {
  const std::size_t count = elements_of(extent.length);
  const std::span<const std::byte> code(from, extent.encoded);
  const bool in_place = is_float32(into, dtype_);
  const std::span<float> values = in_place ? std::span(reinterpret_cast<float*>(into), count)
                                           : compress::scratch(compress::Scratch::kValues, count);
  const compress::Decoded decoded = compression_->codec->decode(code, values, compress::Into::kReplace);
  if (decoded != compress::Decoded::kOk) {
    return decoded == compress::Decoded::kFailed ? Status::kCodec : Status::kProtocol;
  }
  if (!in_place) compress::narrow(dtype_, values, into);
  counters.compressed_bytes.add(extent.encoded);
  counters.uncompressed_bytes.add(extent.length);
  return Status::kOk;
}

}  // namespace bps::worker
