// SPDX-License-Identifier: Apache-2.0
// A pool looks at all processes of the machine, of which some end while it looks.
#include "pool/read_file.h"

#include <gtest/gtest.h>

namespace bps::pool {
namespace {

TEST(ReadFile, AFileThatOpensAndCannotBeReadIsEmpty) {
  EXPECT_EQ(read_file("/proc/self"), "");  // a folder fails as the files of a process do that has ended
  EXPECT_EQ(read_file("/proc/self/no such file"), "");
}

TEST(ReadFile, AllOfAFileIsRead) {
  const std::string all = read_file("/proc/self/environ") + read_file("/proc/self/stat");
  EXPECT_NE(all.find(')'), std::string::npos);
  EXPECT_EQ(all.back(), '\n');
}

}  // namespace
}  // namespace bps::pool
