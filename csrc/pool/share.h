// SPDX-License-Identifier: Apache-2.0
// Decides what a job gets of a pool, by pure functions of what the pool has and what a job may have.
#pragma once

#include <cstdint>
#include <string>

#include "core/settings.h"

namespace bps::pool {

struct Share {
  std::uint32_t cores = 0;
  std::uint64_t memory = 0;  // bytes
};

// A server needs this much for itself, beside its landing slots.
inline constexpr std::uint64_t kOverhead = 32U << 20;
inline constexpr std::uint64_t kLeastMemory = 64U << 20;

struct Limits {
  Share all;  // what the pool has
  Share job;  // what one job may have
  std::uint32_t jobs = 0;
  std::uint32_t user_jobs = 0;

  // `machine` is what this process may use.
  static Limits from(const PoolSettings& settings, const Share& machine);
  // Returns the share of a job that does not say what it needs.
  Share usual() const;
};

// Tells what is taken already.
struct Use {
  Share share;
  std::uint32_t jobs = 0;
  std::uint32_t user_jobs = 0;  // those of the user who asks
};

// Returns what a job gets that asks for `wanted`, where 0 asks for what is usual. Throws an Error with the numbers:
// kInvalidArgument where the job can never have that here, kTransport where the pool is full.
Share grant(const Limits& limits, const Use& use, const Share& wanted, const std::string& user);

}  // namespace bps::pool
