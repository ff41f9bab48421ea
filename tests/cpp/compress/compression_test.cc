// SPDX-License-Identifier: Apache-2.0
#include "compress/compression.h"

#include <gtest/gtest.h>

#include "van/van_fixture.h"

namespace bps::compress {
namespace {

TEST(Compression, SaysMethodAndParameters) {
  const auto plain = parse_compression("int8");
  EXPECT_EQ(plain->codec->encoded_size(256), 260U);
  EXPECT_FALSE(plain->feedback || plain->everywhere || plain->momentum != 0);
  const auto all = parse_compression("int8:feedback=1,momentum=0.5,everywhere=1");
  EXPECT_EQ(all->text, "int8:feedback=1,momentum=0.5,everywhere=1");
  EXPECT_TRUE(all->feedback && all->everywhere);
  EXPECT_EQ(all->momentum, 0.5F);
}

TEST(Compression, RefusesWhatItDoesNotKnow) {
  for (const char* text :
       {"", "zip", "int8:feedback", "int8:feedback=", "int8:=1", "int8:feedback=2", "int8:feedback=1,feedback=1",
        "int8:momentum=nan", "int8:momentum=-1", "int8:momentum=1x", "int8:k=3", "INT8"}) {
    const auto thrown = van::test::thrown_by([&] { (void)parse_compression(text); });
    EXPECT_EQ(thrown.code, ErrorCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace bps::compress
