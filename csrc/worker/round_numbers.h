// SPDX-License-Identifier: Apache-2.0
// Gives a tensor's rounds their numbers. Any thread may call it.
#pragma once

#include <cstdint>

#include "worker/request.h"
#include "worker/tensor.h"

namespace bps::worker {

// Gives the operation that is asked for its round, and binds a compressed tensor to this kind of operation. Throws
// kInvalidArgument where the tensor's compression forbids it; then no round was taken.
std::uint32_t take_round(Tensor& tensor, const Request& request);

// Lets nobody take a round of push() and pull() any more of which one half has failed: the other one skips it.
void void_round(Tensor& tensor, std::uint32_t round);

// Makes an addition that is sent again name the round in which it was sent first. Throws kInvalidArgument after too
// many tries.
void count_tries(Tensor& tensor, Request& request, std::uint32_t round);

}  // namespace bps::worker
