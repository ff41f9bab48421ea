// SPDX-License-Identifier: Apache-2.0
#include "pool/messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "core/error.h"
#include "core/settings.h"
#include "pool/job_settings.h"
#include "pool/sealed_secret.h"
#include "pool/server_process.h"

namespace bps::pool {
namespace {

const NamedValues kJob = {
    {"BPS_NUM_WORKERS", "2"}, {"BPS_NUM_SERVERS", "1"}, {"BPS_ROOT_URI", "10.0.0.1"}, {"BPS_ROOT_PORT", "9010"}};

std::string why_not(NamedValue more) {
  NamedValues settings = kJob;
  settings.push_back(std::move(more));
  try {
    check_settings(settings);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(PoolSettings, AJobSaysWhoTakesPart) {
  EXPECT_NO_THROW(check_settings(kJob));
  EXPECT_EQ(why_not({"BPS_TIMEOUT", "10"}), "");
}

TEST(PoolSettings, AJobNamesNoFilesAndNoPartOfThePool) {
  for (const char* name :
       {"BPS_TRACE", "BPS_DUMP_DIR", "BPS_SECRET_FILE", "BPS_SCHEDULER_STATE", "BPS_RSH", "BPS_SERVER_MEMORY",
        "BPS_SERVER_ENGINE_THREAD", "BPS_METRICS_PORT", "BPS_PORTS", "LD_PRELOAD", "PATH", "_BPS_POOLED", ""}) {
    EXPECT_EQ(why_not({name, "1"}), std::string(name) + " is not for a job of a pool to set");
  }
}

TEST(PoolSettings, AJobWritesNoLinesIntoTheLogOfThePool) {
  for (const std::string& value : {std::string("a\nb"), std::string("a\0b", 3), std::string("\x1b[2J")}) {
    EXPECT_EQ(why_not({"BPS_ROOT_URI", value}), "BPS_ROOT_URI has characters that are not for reading");
  }
}

TEST(PoolSettings, AServerDoesNotWaitForEver) {
  EXPECT_EQ(why_not({"BPS_JOIN_TIMEOUT", "inf"}),
            "BPS_JOIN_TIMEOUT=inf is more than the 600 seconds that a pool waits for a job");
  EXPECT_EQ(why_not({"BPS_HEARTBEAT_TIMEOUT", "601"}),
            "BPS_HEARTBEAT_TIMEOUT=601 is more than the 600 seconds that a pool waits for a job");
}

TEST(PoolSettings, WhatIsMissingOrWrongIsNamed) {
  EXPECT_THROW(check_settings({{"BPS_NUM_WORKERS", "2"}}), Error);
  EXPECT_THROW(check_settings({}), Error);
  EXPECT_NE(why_not({"BPS_TIMEOUT", "soon"}).find("BPS_TIMEOUT='soon'"), std::string::npos);
}

TEST(PoolSettings, OfTheJobArePickedAndOfThePoolAreNot) {
  const SettingValues values([](const std::string& name) -> std::optional<std::string> {
    if (name == "DMLC_NUM_WORKER") return "3";
    if (name == "BPS_TRACE") return "/tmp/x";
    return std::nullopt;
  });
  const NamedValues found = settings_of_job(values);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].name, "BPS_NUM_WORKERS");
  EXPECT_EQ(found[0].value, "3");
}

TEST(PoolSettings, OfThePoolReachServersAndOfItsSecretsNone) {
  ::setenv("BPS_INTERFACE", "lo", 1);
  ::setenv("DMLC_NUM_WORKER", "7", 1);
  ::setenv("BPS_SECRET", "of another job", 1);
  ::setenv("BPS_POOL_KEY_FILE", "/etc/keys", 1);
  const std::vector<std::string> found = environment_of_server({{"BPS_JOB_ID", "a"}});
  for (const char* name : {"BPS_INTERFACE", "DMLC_NUM_WORKER", "BPS_SECRET", "BPS_POOL_KEY_FILE"}) ::unsetenv(name);
  const auto has = [&](std::string_view begin) {
    return std::ranges::any_of(found, [&](const std::string& each) { return each.starts_with(begin); });
  };
  EXPECT_TRUE(has("BPS_INTERFACE=lo"));
  EXPECT_TRUE(has("BPS_JOB_ID=a"));
  EXPECT_FALSE(has("DMLC_NUM_WORKER"));
  EXPECT_FALSE(has("BPS_SECRET"));
  EXPECT_FALSE(has("BPS_POOL"));
}

TEST(PoolSecret, IsSealedWithAnotherStreamEachTime) {
  Digest key{};
  const Bytes text(70, std::byte{'s'});
  const Bytes sealed = seal_secret(key, 1, text);
  EXPECT_NE(sealed, text);
  EXPECT_NE(sealed, seal_secret(key, 2, text));
  EXPECT_EQ(seal_secret(key, 1, sealed), text);
  key[0] = std::byte{1};
  EXPECT_NE(seal_secret(key, 1, sealed), text);
  EXPECT_NE(Bytes(sealed.begin(), sealed.begin() + 32), Bytes(sealed.begin() + 32, sealed.begin() + 64));
}

TEST(PoolAssignment, IsReadBackFromItsText) {
  const Assignment written{.pool = name_of_pool("10.0.0.1", 9030),
                           .user = "alice",
                           .job = "run-1-ab",
                           .share = {.cores = 2, .memory = 1U << 30},
                           .cpus = {0, 17},
                           .seat = 3};
  const auto read = Assignment::from_text(written.to_text());
  ASSERT_TRUE(read);
  EXPECT_EQ(read->to_text(), written.to_text());
  EXPECT_EQ(read->cpus, written.cpus);
  EXPECT_EQ(read->job, "run-1-ab");
  for (const char* text : {"", "9030", "9030 3 2 1 alice", "9030 3 2 1 alice x job", "9030 3 2 1 alice 99999 job",
                           "9030 3 2 1 alice -1 job"}) {
    EXPECT_FALSE(Assignment::from_text(text)) << text;
  }
}

TEST(PoolMessages, AreReadBack) {
  const Request request = Begin{7, kJob, Bytes(32)};
  const auto read = codec::decode<Request>(codec::encode(request));
  ASSERT_TRUE(read);
  EXPECT_EQ(std::get<Begin>(*read).settings[2].value, "10.0.0.1");
  EXPECT_FALSE(codec::decode<Request>(Bytes(1, std::byte{9})));
  const auto full = codec::encode(Request{Begin{7, NamedValues(kMostSettings + 1), Bytes()}});
  EXPECT_FALSE(codec::decode<Request>(full));
}

}  // namespace
}  // namespace bps::pool
