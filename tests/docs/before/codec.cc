// SPDX-License-Identifier: Apache-2.0
// What comes before a class of docs/compression.md; its namespace is closed at the end.
#include <cstddef>
#include <cstdint>
#include <span>

#include "compress/codec.h"

namespace bps::compress {
