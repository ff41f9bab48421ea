// SPDX-License-Identifier: Apache-2.0
// Text as a JSON string, quoted. Threading: pure. Errors: none; bytes from 0x80 on are taken to be UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace bps {

std::string json_string(std::string_view text);

}  // namespace bps
