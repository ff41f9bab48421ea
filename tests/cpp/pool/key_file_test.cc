// SPDX-License-Identifier: Apache-2.0
#include "pool/key_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>

#include "core/error.h"

namespace bps::pool {
namespace {

class PoolKeyFile : public testing::Test {
 protected:
  ~PoolKeyFile() override { (void)std::remove(path_.c_str()); }

  std::string write(const std::string& text, mode_t mode = 0600) {
    std::ofstream(path_) << text;
    ::chmod(path_.c_str(), mode);
    return path_;
  }
  std::string why_not(const std::string& text) {
    try {
      (void)read_keys(write(text));
    } catch (const Error& error) {
      return std::string(error.what()).substr(path_.size());
    }
    return "";
  }

  const std::string path_ = testing::TempDir() + "bps_pool_keys";
};

constexpr const char* kKey = "0123456789abcdef";

TEST_F(PoolKeyFile, HasALineForEachUser) {
  const auto keys = read_keys(write("# users\n\n  alice " + std::string(kKey) + "\nbob\t" + kKey + "x \n"));
  ASSERT_EQ(keys.size(), 2U);
  EXPECT_EQ(keys[0].user, "alice");
  EXPECT_EQ(keys[0].key, kKey);
  EXPECT_EQ(keys[1].user, "bob");
  EXPECT_EQ(keys[1].key, std::string(kKey) + "x");
}

TEST_F(PoolKeyFile, OfOneUserNeedsNoName) {
  EXPECT_EQ(read_key(write("alice " + std::string(kKey)), "root").user, "alice");
  const std::string several = write("alice " + std::string(kKey) + "\nbob " + kKey);
  EXPECT_EQ(read_key(several, "bob").user, "bob");
  EXPECT_THROW(read_key(several, "root"), Error);
}

TEST_F(PoolKeyFile, SaysWhichLineIsWrong) {
  EXPECT_EQ(why_not("alice " + std::string(kKey) + "\nbob\n"),
            ", line 2, is not a user and a key of at least 16 characters");
  EXPECT_EQ(why_not("alice short"), ", line 1, is not a user and a key of at least 16 characters");
  EXPECT_EQ(why_not("-alice " + std::string(kKey)), ", line 1, is not a user and a key of at least 16 characters");
  EXPECT_EQ(why_not("alice " + std::string(kKey) + "\nalice " + kKey), ", line 2, is the second one of the user alice");
}

TEST_F(PoolKeyFile, IsClosedToOthers) {
  EXPECT_THROW(read_keys(write("alice " + std::string(kKey), 0644)), Error);
  EXPECT_THROW(read_keys(path_ + "-that-is-not-there"), Error);
  EXPECT_THROW(read_keys(""), Error);
}

TEST(PoolKey, IsNewEachTime) {
  const std::string line = new_line("alice");
  EXPECT_TRUE(line.starts_with("alice "));
  EXPECT_EQ(line.size(), 6U + 64U);
  EXPECT_NE(line, new_line("alice"));
  for (const char* name : {"", "al ice", "-a", "a\n"}) EXPECT_THROW(new_line(name), Error) << name;
}

TEST(PoolKey, UsersWithOneKeyAreDifferent) {
  const auto alice = credentials_of({"alice", kKey});
  const auto bob = credentials_of({"bob", kKey});
  EXPECT_NE(alice.job, bob.job);
  EXPECT_NE(alice.key, bob.key);
}

}  // namespace
}  // namespace bps::pool
