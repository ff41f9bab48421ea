// SPDX-License-Identifier: Apache-2.0
// Opens libibverbs and librdmacm at run time, once, and never closes them. So this program starts where they are not
// installed, and says so. Their functions are defined in verbs_dl.cc, hidden, under their own names: what calls them
// looks as if it were linked with the libraries.
#pragma once

#include <string>

namespace bps::transport::rdma {

struct RdmaLibraries {
  bool ready = false;
  std::string why_not;  // "" when ready
  std::string hint;
  std::string verbs;  // names of files, which carry the versions: "libibverbs.so.1.14.44.0"
  std::string cm;
};

inline constexpr const char* kVerbsLibrary = "libibverbs.so.1";  // the name of its ABI version

// The name counts in the first call of the process.
const RdmaLibraries& rdma_libraries(const char* verbs = kVerbsLibrary);

}  // namespace bps::transport::rdma
