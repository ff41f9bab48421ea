// SPDX-License-Identifier: Apache-2.0
// The numbers of a tensor's rounds. Threading: any thread.
#pragma once

#include <cstdint>

#include "worker/request.h"
#include "worker/tensor.h"

namespace bps::worker {

// Gives the operation that is asked for its round, and binds a compressed tensor to this kind of operation. Throws
// kInvalidArgument where the tensor's compression forbids it; then no round was taken.
std::uint32_t take_round(Tensor& tensor, const Request& request);

// An addition that is sent again names the round in which it was sent first. Throws kInvalidArgument after too many.
void count_tries(Tensor& tensor, Request& request, std::uint32_t round);

}  // namespace bps::worker
