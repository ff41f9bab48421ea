// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/record.h"

#include <gtest/gtest.h>

namespace bps::transport::shm {
namespace {

bool travels(const ShmRecord& record) {
  const auto bytes = codec::encode(record);
  const auto back = codec::decode<ShmRecord>(bytes);
  return back && codec::encode(*back) == bytes;
}

TEST(ShmRecord, EveryKindTravels) {
  for (const auto kind :
       {ShmRecord::kSetup, ShmRecord::kReply, ShmRecord::kMapped, ShmRecord::kPlain, ShmRecord::kWithdrawn}) {
    ShmRecord record{};
    record.kind = kind;
    record.key = 7;
    EXPECT_TRUE(travels(record)) << kind;
  }
}

TEST(ShmRecord, RangesOutsideOfTheFileOrTheAddressSpaceAreRefused) {
  ShmRecord mapped{};
  mapped.kind = ShmRecord::kMapped;
  mapped.base = 4096;
  mapped.size = 4096;
  mapped.file_size = 8192;
  EXPECT_TRUE(travels(mapped));
  mapped.size = 4097;
  EXPECT_FALSE(travels(mapped));
  mapped.size = ~std::uint64_t{0};
  EXPECT_FALSE(travels(mapped));
  mapped.base = 8193;
  mapped.size = 0;
  EXPECT_FALSE(travels(mapped));
  ShmRecord plain{};
  plain.kind = ShmRecord::kPlain;
  plain.base = ~std::uint64_t{0} - 10;
  plain.size = 10;
  EXPECT_TRUE(travels(plain));
  plain.size = 11;
  EXPECT_FALSE(travels(plain));
}

TEST(ShmRecord, FieldsOfAnotherKindAreRefused) {
  ShmRecord record{};
  EXPECT_FALSE(travels(record)) << "no kind";
  record.kind = ShmRecord::Kind{7};
  EXPECT_FALSE(travels(record)) << "an unknown kind";
  record.kind = ShmRecord::kReply;
  record.reaches_plain = 1;
  EXPECT_TRUE(travels(record));
  record.reaches_plain = 2;
  EXPECT_FALSE(travels(record));
  record.kind = ShmRecord::kSetup;
  record.reaches_plain = 1;
  EXPECT_FALSE(travels(record));
  record.reaches_plain = 0;
  record.file_size = 1;
  EXPECT_FALSE(travels(record));
}

}  // namespace
}  // namespace bps::transport::shm
