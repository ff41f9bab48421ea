// SPDX-License-Identifier: Apache-2.0
// Knows the GPUs of this process. The driver, and a GPU, is opened when memory of it is first met.
//
// Any thread may call it. It throws kTransport when there is no driver, and in a child that was forked after the driver
// was opened, because CUDA does not survive a fork.
#pragma once

#include <string>

#include "device/device.h"

namespace bps::device {

// Returns the GPU that the memory belongs to, by the driver of this name; null for other memory. Throws without a
// driver, whatever memory it is.
Device* find_owner(const std::string& library, const void* memory);

}  // namespace bps::device
