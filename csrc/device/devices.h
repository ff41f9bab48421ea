// SPDX-License-Identifier: Apache-2.0
// Knows the GPUs of this process. The driver, and a GPU, is opened when memory of it is first met.
//
// Any thread may call it. It throws kTransport when there is no driver, and in a child that was forked after the driver
// was opened, because CUDA does not survive a fork.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "device/device.h"

namespace bps::device {

// Returns the GPU that the memory belongs to, by the driver of this name; null for other memory. Throws without a
// driver, whatever memory it is.
Device* find_owner(const std::string& library, const void* memory);

// What is known of the GPU of a rank before it has shown an array.
struct GpuFacts {
  std::optional<cuda::Ordinal> wanted{};   // by the user
  std::optional<cuda::Ordinal> current{};  // that of the calling thread's context
  int count = 0;                           // those that the process sees
  std::optional<std::uint32_t> local_rank{};
};
// Returns the GPU that the facts name, in their order, or the only one; nothing where there are several, and no local
// rank says which. A pure function, which throws kInvalidArgument for a wanted one that there is not.
std::optional<cuda::Ordinal> choose_gpu(const GpuFacts& facts);
// Returns the PCI address of that GPU as the kernel writes it, "0000:1a:00.0"; empty where there is none. Makes no
// context.
std::string address_of_gpu(const std::string& library, std::optional<cuda::Ordinal> wanted,
                           std::optional<std::uint32_t> local_rank);

}  // namespace bps::device
