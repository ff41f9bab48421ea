// SPDX-License-Identifier: Apache-2.0
// Measures how fast this machine adds what workers push. It takes some milliseconds, at the start of a process.
//
// The figure is an upper bound. That bytes come and go has a price, too, which is small over RDMA and large over TCP.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bps::server {

// Returns how many bytes of pushes so many server loops add per second together, on as many cores as this process may
// use. Two workers push float32 that does not fit into the cache of a core. Throws kTransport without threads.
double measure_sum_rate(std::size_t loops);

// Rounds to a power of the square root of two, so that hosts that are alike get the same figure although no two
// measurements are equal.
std::uint64_t coarse_rate(double rate);

}  // namespace bps::server
