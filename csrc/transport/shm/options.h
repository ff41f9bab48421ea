// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace bps::transport::shm {

struct ShmOptions {
  bool cross_memory = true;  // copies from and to the peer's plain memory where the kernel allows it
  // A peer that is lost but still maps our memory is ended. Where this is false peers are given staging buffers only.
  bool end_lost_peers = true;
};

}  // namespace bps::transport::shm
