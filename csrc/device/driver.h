// SPDX-License-Identifier: Apache-2.0
// Opens CUDA's driver at run time, so that one build runs with and without a GPU.
//
// Any thread may call it. A driver that was opened stays open. A child that was forked must not call it: CUDA does not
// survive a fork. open() and check() throw kTransport with CUDA's own words, and kInvalidArgument where a capture into
// a CUDA graph forbids the call.
#pragma once

#include <string>

#include "device/cuda.h"

namespace bps::device {

// This is the hint of errors that a capture causes.
inline constexpr const char* kEndCapture = "call operations of bps_rdma while no stream is captured into a CUDA graph";

class Driver {
 public:
  static constexpr const char* kLibrary = "libcuda.so.1";  // the name of its ABI version

  // Throws when the library cannot be opened, lacks a function, or cannot be used.
  static Driver open(const std::string& library = kLibrary);

  const cuda::Functions& call() const { return functions_; }
  // Returns "an illegal memory access was encountered (CUDA error 700)".
  std::string describe(cuda::Result result) const;
  // Throws unless it is a success. `what` is as in "cannot create a stream".
  void check(cuda::Result result, const std::string& what) const;

 private:
  cuda::Functions functions_;
};

}  // namespace bps::device
