#include "core/bytes.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace bps {
namespace {

// Apart, because gcc 12 follows the sizes of an inlined vector and warns of an overflow that cannot be.
[[gnu::noinline]] void write_sample(Writer& writer) {
  writer.put(std::uint8_t{7}).put(std::uint16_t{0x1234}).put(std::int32_t{-5}).put(~std::uint64_t{0}).put("name");
  const Bytes tail{std::byte{1}, std::byte{2}};
  writer.put_bytes(tail).put_raw(tail);
}

Bytes sample() {
  Writer writer;
  write_sample(writer);
  return writer.take();
}

TEST(Bytes, RoundTrip) {
  const Bytes bytes = sample();
  Reader reader(bytes);
  EXPECT_EQ(reader.get<std::uint8_t>(), 7);
  EXPECT_EQ(reader.get<std::uint16_t>(), 0x1234);
  EXPECT_EQ(reader.get<std::int32_t>(), -5);
  EXPECT_EQ(reader.get<std::uint64_t>(), ~std::uint64_t{0});
  EXPECT_EQ(reader.get_string(), "name");
  EXPECT_EQ(reader.get_bytes().size(), 2U);
  EXPECT_FALSE(reader.done());
  EXPECT_EQ(reader.get_raw(2)[1], std::byte{2});
  EXPECT_TRUE(reader.done());
}

TEST(Bytes, AreLittleEndian) {
  const Bytes bytes = Writer().put(std::uint32_t{0x01020304}).put("A").take();
  const Bytes expected{std::byte{4}, std::byte{3}, std::byte{2}, std::byte{1},  std::byte{1},
                       std::byte{0}, std::byte{0}, std::byte{0}, std::byte{'A'}};
  EXPECT_EQ(bytes, expected);
}

// Exact heap blocks of every shorter length: AddressSanitizer sees any byte read past the end.
TEST(Reader, NoticesEveryTruncation) {
  const Bytes whole = sample();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const Bytes bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
    Reader reader(bytes);
    reader.get<std::uint8_t>();
    reader.get<std::uint16_t>();
    reader.get<std::int32_t>();
    reader.get<std::uint64_t>();
    reader.get_string();
    reader.get_bytes();
    reader.get_raw(2);
    EXPECT_FALSE(reader.ok()) << length;
    EXPECT_FALSE(reader.done()) << length;
  }
}

TEST(Reader, YieldsNothingAfterAnOverrun) {
  const Bytes bytes = Writer().put(std::uint32_t{0xffffffff}).put(std::uint64_t{42}).take();
  Reader reader(bytes);
  EXPECT_TRUE(reader.get_bytes().empty());  // announces 4 GiB
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.get<std::uint64_t>(), 0U);
  EXPECT_EQ(reader.get_string(), "");
  EXPECT_TRUE(reader.get_raw(0).empty());
  EXPECT_FALSE(reader.done());
}

TEST(Reader, RefusesCountsThatCannotBeThere) {
  const Bytes bytes(64);
  EXPECT_TRUE(Reader(bytes).fits(8, 8));
  EXPECT_FALSE(Reader(bytes).fits(9, 8));
  EXPECT_FALSE(Reader(bytes).fits(std::numeric_limits<std::uint64_t>::max(), 8));
  EXPECT_TRUE(Reader({}).fits(0, 1));
  Reader reader(bytes);
  EXPECT_FALSE(reader.fits(65, 1));
  EXPECT_FALSE(reader.ok());
}

TEST(Reader, SurvivesNoise) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    Bytes bytes(random() % 64);
    for (auto& byte : bytes) byte = static_cast<std::byte>(random() % 8 == 0 ? random() : 0);
    Reader reader(bytes);
    std::size_t taken = 0;
    while (reader.ok() && !reader.done()) {
      if (random() % 2 != 0) {
        taken += sizeof(std::uint32_t) + reader.get_bytes().size();
      } else {
        reader.get<std::uint16_t>();
        taken += sizeof(std::uint16_t);
      }
    }
    if (reader.ok()) {
      EXPECT_EQ(taken, bytes.size());
    }
  }
}

}  // namespace
}  // namespace bps
