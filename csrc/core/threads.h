// SPDX-License-Identifier: Apache-2.0
// Starts threads. Where the system allows no more of them, it throws kTransport and names the limit, instead of
// std::system_error with nothing but "Resource temporarily unavailable".
#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include "core/limits.h"

namespace bps {

template <typename Body>
std::thread start_thread(Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw_no_thread(error.code().value());
  }
}

}  // namespace bps
