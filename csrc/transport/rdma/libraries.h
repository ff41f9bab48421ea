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

const RdmaLibraries& rdma_libraries();

}  // namespace bps::transport::rdma
