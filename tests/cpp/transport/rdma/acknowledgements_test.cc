// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/acknowledgements.h"

#include <gtest/gtest.h>

namespace bps::transport::rdma {
namespace {

TEST(Acknowledgements, RequestsOfWhichNoneFinishesAreMissed) {
  Acknowledgements seen;
  seen.look(3, 1);
  EXPECT_EQ(seen.missed(), 0U) << "one has finished since nothing was posted";
  for (std::uint32_t i = 1; i < 5; ++i) {
    seen.look(3 + i, 1);  // what is posted meanwhile changes nothing
    EXPECT_EQ(seen.missed(), i);
  }
  seen.look(8, 2);
  EXPECT_EQ(seen.missed(), 0U);
}

TEST(Acknowledgements, NothingIsMissedWhereNothingIsUnderWay) {
  Acknowledgements seen;
  for (int i = 0; i < 10; ++i) seen.look(7, 7);
  EXPECT_EQ(seen.missed(), 0U);
  seen.look(8, 7);
  EXPECT_EQ(seen.missed(), 1U);
  seen.look(8, 8);
  EXPECT_EQ(seen.missed(), 0U);
}

}  // namespace
}  // namespace bps::transport::rdma
