// SPDX-License-Identifier: Apache-2.0
#include "core/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "core/error.h"

namespace bps::codec {
namespace {

enum class Color : std::uint16_t { kRed = 1, kBlue = 2 };
constexpr bool is_valid(Color color) {
  return color == Color::kRed || color == Color::kBlue;
}

struct Point {
  std::int32_t x = 0;
  std::uint8_t y = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.x, m.y); }
  bool operator==(const Point&) const = default;
};
struct Everything {
  std::uint64_t number = 1;
  bool flag = false;
  Color color = Color::kRed;
  std::array<std::byte, 3> raw{};
  std::string text;
  Bytes bytes;
  Point point;
  std::vector<Point> points;
  std::vector<std::uint16_t> numbers;
  static constexpr void fields(auto& io, auto& m) {
    io(m.number, m.flag, m.color, m.raw);
    io.bounded(m.text, 10);
    io.bounded(m.bytes, 4);
    io(m.point, m.points, m.numbers);
    io.require([&] { return m.number != 0; });
  }
  bool operator==(const Everything&) const = default;
};
struct Nothing {
  static constexpr void fields(auto&, auto&) {}
  bool operator==(const Nothing&) const = default;
};
struct List {
  std::vector<Point> points;
  static constexpr void fields(auto& io, auto& m) { io(m.points); }
};
using Either = std::variant<Nothing, Everything, Point>;

Everything sample() {
  return {.number = 0x0102030405060708,
          .flag = true,
          .color = Color::kBlue,
          .raw = {std::byte{1}, std::byte{2}, std::byte{3}},
          .text = "name",
          .bytes = {std::byte{4}, std::byte{5}},
          .point = {-2, 7},
          .points = {{1, 2}, {3, 4}},
          .numbers = {9}};
}
Bytes changed(std::size_t at, std::uint8_t to) {
  Bytes bytes = encode(sample());
  bytes.at(at) = std::byte{to};
  return bytes;
}

TEST(Codec, BytesAreLittleEndianWithoutPadding) {
  constexpr std::uint8_t kGolden[] = {8,   7,   6,   5,   4,   3,   2,         // number
                                      1,   1,   2,   0,   1,   2,   3,         // ..., flag, color, raw
                                      4,   0,   0,   0,   'n', 'a', 'm', 'e',  // text
                                      2,   0,   0,   0,   4,   5,              // bytes
                                      254, 255, 255, 255, 7,                   // point
                                      2,   0,   0,   0,   1,   0,   0,   0,   2, 3, 0, 0, 0, 4,  // points
                                      1,   0,   0,   0,   9,   0};                               // numbers
  const Bytes bytes = encode(sample());
  EXPECT_TRUE(std::ranges::equal(bytes, std::as_bytes(std::span(kGolden))));
}

TEST(Codec, RoundTrip) {
  EXPECT_EQ(decode<Everything>(encode(sample())), sample());
  EXPECT_EQ(decode<Everything>(encode(Everything{})), Everything{});
  for (const Either& either : {Either(Nothing{}), Either(sample()), Either(Point{5, 6})}) {
    const Bytes bytes = encode(either);
    EXPECT_EQ(static_cast<std::size_t>(bytes[0]), either.index());
    EXPECT_EQ(decode<Either>(bytes), either);
  }
}

// Exact heap blocks of every shorter length: AddressSanitizer sees any byte that is read past the end.
TEST(Codec, EveryTruncationAndExtensionIsRefused) {
  const Bytes whole = encode(Either(sample()));
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(decode<Either>(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)))) << length;
  }
  Bytes longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(decode<Either>(longer));
}

TEST(Codec, ValuesOutsideOfTheirTypeAreRefused) {
  EXPECT_TRUE(decode<Everything>(changed(8, 0))) << "a flag may be 0";
  EXPECT_FALSE(decode<Everything>(changed(8, 2))) << "a flag is 0 or 1";
  EXPECT_FALSE(decode<Everything>(changed(9, 3))) << "an enumerator that does not exist";
  EXPECT_FALSE(decode<Everything>(changed(10, 1))) << "an enumerator that does not exist";
  EXPECT_FALSE(decode<Either>(Bytes(1, std::byte{3}))) << "an alternative that does not exist";
  Everything zero = sample();
  zero.number = 0;
  EXPECT_FALSE(decode<Everything>(encode(zero))) << "the message requires a number";
}

TEST(Codec, TextsAreCutOnTheWayOutAndRefusedOnTheWayIn) {
  Everything longer = sample();
  longer.text.assign(100, 'x');
  longer.bytes.assign(100, std::byte{7});
  const auto back = decode<Everything>(encode(longer));
  ASSERT_TRUE(back);
  EXPECT_EQ(back->text.size(), 10U);
  EXPECT_EQ(back->bytes.size(), 4U);
  Bytes bytes = encode(*back);
  bytes[14] = std::byte{11};  // one character more than the bound, and it is there
  bytes.insert(bytes.begin() + 18, std::byte{'x'});
  EXPECT_FALSE(decode<Everything>(bytes));
}

TEST(Codec, CountsThatCannotBeThereAllocateNothing) {
  Bytes bytes = encode(List{{{1, 2}, {3, 4}}});
  ASSERT_TRUE(decode<List>(bytes));
  for (const unsigned last : {0x7fU, 0xffU}) {
    bytes[3] = static_cast<std::byte>(last);
    EXPECT_FALSE(decode<List>(bytes));
  }
  bytes[3] = std::byte{0};
  bytes[0] = std::byte{3};
  EXPECT_FALSE(decode<List>(bytes));
}

TEST(Codec, NoiseIsRefusedOrEncodesToItself) {
  std::mt19937 random(3);
  const Bytes seed = encode(Either(sample()));
  int accepted = 0;
  for (int round = 0; round < 100'000; ++round) {
    Bytes bytes = seed;
    for (std::size_t edits = random() % 4; edits > 0; --edits) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random() % 4 == 0 ? random() : random() % 4);
    }
    if (random() % 8 == 0) bytes.resize(random() % (bytes.size() + 4));
    if (const auto message = decode<Either>(bytes)) {
      ++accepted;
      ASSERT_EQ(encode(*message), bytes);
    }
  }
  EXPECT_GT(accepted, 10'000);
}

// ---- Messages of fixed size

struct Small {
  std::uint32_t a = 1;
  Color color = Color::kRed;
  std::uint8_t b = 2;
  std::uint8_t c = 3;
  static constexpr void fields(auto& io, auto& m) {
    io(m.a, m.color, m.b, m.c);
    io.require([&] { return m.c != 9; });
  }
};
struct Swapped {  // the list has another order than the struct
  std::uint32_t a = 1, b = 2;
  static constexpr void fields(auto& io, auto& m) { io(m.b, m.a); }
};
struct Forgetful {  // a field is not in the list
  std::uint32_t a = 1, b = 2;
  static constexpr void fields(auto& io, auto& m) { io(m.a); }
};
struct Repeated {
  std::uint32_t a = 1, b = 2;
  static constexpr void fields(auto& io, auto& m) { io(m.a, m.a); }
};
struct Padded {
  std::uint8_t a = 1;
  std::uint32_t b = 2;
  static constexpr void fields(auto& io, auto& m) { io(m.a, m.b); }
};

static_assert(kSize<Small> == 8 && kSize<Padded> == 5 && kSize<Nothing> == 0);
static_assert(Plain<Small> && !Plain<Swapped> && !Plain<Forgetful> && !Plain<Repeated> && !Plain<Padded>);
static_assert(encode(Small{})[6] == std::byte{2}, "arrays are encoded at compile time");

TEST(Codec, FixedMessagesRoundTripThroughArrays) {
  const std::array<std::byte, 5> bytes = encode(Padded{3, 4});
  const auto back = decode<Padded>(bytes);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->a, 3);
  EXPECT_EQ(back->b, 4U);
  EXPECT_FALSE(decode<Padded>(std::span(bytes).first(4)));
  Bytes longer(bytes.begin(), bytes.end());
  longer.resize(9);
  EXPECT_FALSE(decode<Padded>(longer));
  EXPECT_TRUE(decode_front<Padded>(longer));
  EXPECT_FALSE(decode_front<Padded>(std::span(longer).first(4)));
}

TEST(Codec, PlainMessagesAreTheirOwnBytes) {
  Small small{.a = 0x01020304, .color = Color::kBlue, .b = 5, .c = 6};
  EXPECT_TRUE(std::ranges::equal(bytes_of(small), encode(small)));
  EXPECT_TRUE(accepts(small));
  writable_bytes_of(small)[7] = std::byte{9};
  EXPECT_FALSE(accepts(small)) << "what the list requires";
  writable_bytes_of(small)[7] = std::byte{8};
  EXPECT_TRUE(accepts(small));
  writable_bytes_of(small)[5] = std::byte{1};
  EXPECT_FALSE(accepts(small)) << "an enumerator that does not exist";
}

TEST(Codec, EveryErrorCodeTravels) {
  EXPECT_TRUE(is_valid(ErrorCode::kInvalidArgument));
  EXPECT_TRUE(is_valid(ErrorCode::kInternal));
  EXPECT_FALSE(is_valid(ErrorCode{static_cast<std::uint8_t>(ErrorCode::kRoundAborted) + 1}));
}

}  // namespace
}  // namespace bps::codec
