// SPDX-License-Identifier: Apache-2.0
// CUDA's driver, opened at run time: one build runs with and without a GPU.
//
// Threading: any thread. A driver that was opened stays open. A child that was forked must not call it: CUDA does not
// survive a fork.
// Errors: open() and check() throw kTransport with CUDA's own words; kInvalidArgument where a capture into a CUDA graph
// forbids the call.
#pragma once

#include <string>

#include "device/cuda.h"

namespace bps::device {

// The hint of errors that a capture causes.
inline constexpr const char* kEndCapture = "call operations of bps_rdma while no stream is captured into a CUDA graph";

class Driver {
 public:
  static constexpr const char* kLibrary = "libcuda.so.1";  // by the name of its ABI version

  // Throws when the library cannot be opened, lacks a function, or cannot be used.
  static Driver open(const std::string& library = kLibrary);

  const cuda::Functions& call() const { return functions_; }
  // "an illegal memory access was encountered (CUDA error 700)"
  std::string describe(cuda::Result result) const;
  // Throws unless it is a success; `what` is as in "cannot create a stream".
  void check(cuda::Result result, const std::string& what) const;

 private:
  cuda::Functions functions_;
};

}  // namespace bps::device
