// SPDX-License-Identifier: Apache-2.0
#include "compress/codec_call.h"

#include <utility>

#include "core/error.h"

namespace bps::compress {
namespace {

thread_local std::string t_failure;

}  // namespace

thread_local CodecCall* CodecCall::t_innermost = nullptr;

void CodecCall::refuse_within() {
  if (t_innermost == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              "the codec '" + t_innermost->codec_ + "' calls bps_rdma, which waits for that codec",
              "call nothing of bps_rdma in encode() and decode()");
}

void CodecCall::fail(std::string why) {
  if (t_failure.empty()) t_failure = std::move(why);
}

bool CodecCall::has_failed() {
  return !t_failure.empty();
}

std::string CodecCall::take_failure() {
  return std::exchange(t_failure, {});
}

}  // namespace bps::compress
