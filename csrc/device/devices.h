// SPDX-License-Identifier: Apache-2.0
// The GPUs of this process. The driver is opened, and a GPU is, when memory of it is first met.
//
// Threading: any thread. Errors: kTransport, when there is no driver; and in a child that was forked after that,
// because CUDA does not survive a fork.
#pragma once

#include <string>

#include "device/device.h"

namespace bps::device {

// The GPU that the memory belongs to, by the driver of this name; nullptr for other memory. Throws without a driver,
// whatever memory it is.
Device* find_owner(const std::string& library, const void* memory);

}  // namespace bps::device
