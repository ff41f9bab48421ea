// SPDX-License-Identifier: Apache-2.0
#include "van/origin.h"

#include <gtest/gtest.h>

#include <initializer_list>

namespace bps::van {
namespace {

Origin started_as(std::initializer_list<std::string> pieces) {
  Origin origin;
  for (const std::string& piece : pieces) {
    if (!origin.command.empty()) origin.command += Origin::kCut;
    origin.command += piece;
  }
  return origin;
}

TEST(Origin, OwnNumbersMayDiffer) {
  const Origin zero = started_as({"=train.py --rank ", "#0", "= --epochs ", "#0"});
  const Origin one = started_as({"=train.py --rank ", "#1", "= --epochs ", "=0"});
  EXPECT_TRUE(may_belong_together(zero, one)) << "the number of epochs happens to be the rank of one of them";
  EXPECT_TRUE(may_belong_together(one, zero));
  EXPECT_EQ(command_of(one), "train.py --rank 1 --epochs 0");
}

TEST(Origin, OtherArgumentsMayNot) {
  const Origin ours = started_as({"=train.py --lr ", "=0", "=.", "=1"});
  EXPECT_TRUE(may_belong_together(ours, ours));
  EXPECT_FALSE(may_belong_together(ours, started_as({"=train.py --lr ", "=0", "=.", "=2"})));
  EXPECT_FALSE(may_belong_together(ours, started_as({"=train.py --lr ", "=0", "=.", "#2"}))) << "no number of both";
  EXPECT_FALSE(may_belong_together(ours, started_as({"=train.py --lr ", "=0"})));
  EXPECT_FALSE(may_belong_together(ours, started_as({"=other.py --lr ", "=0", "=.", "=1"})));
}

TEST(Origin, NothingKnownFitsEverything) {
  EXPECT_TRUE(may_belong_together({}, started_as({"=train.py"})));
  EXPECT_TRUE(may_belong_together(started_as({"=train.py"}), {}));
}

}  // namespace
}  // namespace bps::van
