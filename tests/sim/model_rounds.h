// SPDX-License-Identifier: Apache-2.0
// The job of tests/model/rounds.pml, simulated: two workers call push_pull on two tensors, one server loop sums them,
// and each worker has one landing slot. What happens is recorded as the actions of that model, so that spin can say
// whether the code does anything that the model does not.
#pragma once

#include <cstdint>
#include <vector>

namespace bps::sim {

// As ACTION() in rounds.pml numbers them.
std::vector<std::uint32_t> record_rounds(std::uint64_t seed);

}  // namespace bps::sim
