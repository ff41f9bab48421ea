// SPDX-License-Identifier: Apache-2.0
#include "core/hmac.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "core/bytes.h"

namespace bps {
namespace {

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += "0123456789abcdef"[static_cast<unsigned>(byte >> 4)];
    text += "0123456789abcdef"[static_cast<unsigned>(byte & std::byte{15})];
  }
  return text;
}

std::string sha256_of(std::string_view text) {
  return hex(sha256(as_bytes(text)));
}

std::string hmac_of(std::string_view key, std::string_view message) {
  return hex(hmac_sha256(as_bytes(key), {as_bytes(message)}));
}

// FIPS 180-4 examples (NIST, "SHA256.pdf" and the long messages).
TEST(Sha256, MatchesTheVectorsOfNist) {
  EXPECT_EQ(sha256_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
                      "mnopqrstnopqrstu"),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(sha256_of(std::string(1'000'000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// The padding has its edges at 55, 56 and 64 bytes: the digests of all lengths below 200, digested (by hashlib).
TEST(Sha256, PadsEveryLength) {
  std::vector<std::byte> digests;
  for (std::size_t length = 0; length < 200; ++length) {
    const Digest digest = sha256(as_bytes(std::string(length, 'a')));
    digests.insert(digests.end(), digest.begin(), digest.end());
  }
  EXPECT_EQ(hex(sha256(digests)), "752c007f38611cfbf5fa42cb1cea3d8e086491c844d0cc4defd632cb81423506");
}

TEST(Hmac, MatchesTheVectorsOfRfc4231) {
  EXPECT_EQ(hmac_of(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac_of("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac_of(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  EXPECT_EQ(hmac_of(counting, std::string(50, '\xcd')),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hmac_of(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(
      hmac_of(std::string(131, '\xaa'),
              "This is a test using a larger than block-size key and a larger than block-size data. The key needs "
              "to be hashed before being used by the HMAC algorithm."),
      "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(Sha256, TakesAMessageInParts) {
  const std::string message(300, 'x');
  for (std::size_t cut = 0; cut <= message.size(); ++cut) {
    Sha256 hash;
    hash.update(as_bytes(message).first(cut));
    hash.update(as_bytes(message).subspan(cut));
    ASSERT_EQ(hash.finish(), sha256(as_bytes(message))) << cut;
  }
}

TEST(EqualConstantTime, Compares) {
  EXPECT_TRUE(equal_constant_time(as_bytes("secret"), as_bytes("secret")));
  EXPECT_TRUE(equal_constant_time({}, {}));
  EXPECT_FALSE(equal_constant_time(as_bytes("secret"), as_bytes("secreT")));
  EXPECT_FALSE(equal_constant_time(as_bytes("secret"), as_bytes("Secret")));
  EXPECT_FALSE(equal_constant_time(as_bytes("secret"), as_bytes("secret!")));
}

TEST(RandomBytes, DifferAndFillEverything) {
  std::set<std::vector<std::byte>> seen;
  for (int i = 0; i < 50; ++i) {
    std::vector<std::byte> bytes(16);
    random_bytes(bytes);
    EXPECT_TRUE(seen.insert(bytes).second);
  }
  std::vector<std::byte> large(100'000);
  random_bytes(large);
  EXPECT_FALSE(std::ranges::all_of(std::span(large).last(16), [](std::byte b) { return b == std::byte{0}; }));
  random_bytes({});
}

}  // namespace
}  // namespace bps
