// SPDX-License-Identifier: Apache-2.0
// Computes how much of a group's bytes the servers of each host should sum, so that the slowest link is done as early
// as it can.
//
// Let the group make N contributions, r of them on this host: its ranks, or one for all of them where a host sums
// first. Let this host sum the share x of the bytes. Then each byte of the tensor puts on its link, in each direction,
//
//     r (1 - x)   pushes to other hosts, and the answers to them
//     (N - r) x   answers to other hosts, and their pushes
//
// which is r + (N - 2r) x; on a host without ranks of the group it is N x. Its servers sum N x. The time of a byte is
// the largest of load / speed over all hosts. link_shares() makes that as small as it can be; the shares add up to 1.
// The model is that of Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous
// GPU/CPU Clusters" (OSDI'20, section 3.1), for links that differ.
//
// All are pure functions. Every process computes the same, bit for bit: they use +, -, *, / and comparisons only, and
// nothing here is compiled to fused multiplications (-ffp-contract=off).
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace bps::van {

// Describes a host as one group sees it.
struct Site {
  double link = 1;                                        // bytes per second in each direction
  double sums = std::numeric_limits<double>::infinity();  // bytes of contributions per second; 0: it has no server
  std::uint32_t contributions = 0;                        // how many the group makes here; 0: it is a spare host
};

// Returns the share of each site; all are 0 where no site has a server. Where several answers are as fast, spare hosts
// sum as much as they can, so that the hosts of ranks have their processors for themselves.
std::vector<double> link_shares(std::span<const Site> sites);

// Says for how many seconds a byte of the tensor keeps a site busy. The time of a byte is the largest of all these.
struct Busy {
  double link = 0;
  double sums = 0;
};
std::vector<Busy> busy_per_byte(std::span<const Site> sites, std::span<const double> shares);
double seconds_per_byte(std::span<const Site> sites, std::span<const double> shares);

}  // namespace bps::van
