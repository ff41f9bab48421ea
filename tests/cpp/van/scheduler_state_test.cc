// SPDX-License-Identifier: Apache-2.0
#include "van/scheduler_state.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "core/error.h"

namespace bps::van {
namespace {

class SchedulerState : public testing::Test {
 protected:
  SchedulerState() { std::filesystem::create_directory(folder_); }
  ~SchedulerState() override { std::filesystem::remove_all(folder_); }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("bps-state-" + std::to_string(::getpid()));
  const std::string path_ = (folder_ / "state").string();
};

TEST_F(SchedulerState, TheNextSchedulerHasTheSameRun) {
  const KnownRun first = run_from_state(path_);
  EXPECT_NE(first.run, 0);
  EXPECT_FALSE(first.has_begun);
  const KnownRun second = run_from_state(path_);
  EXPECT_EQ(second.run, first.run);
  EXPECT_TRUE(second.has_begun);
  struct stat found{};
  ASSERT_EQ(::stat(path_.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1) << "nothing else is left there";
  forget_state(path_);
  EXPECT_NE(run_from_state(path_).run, first.run) << "the next job is another run";
}

TEST_F(SchedulerState, WhatIsNoSuchFileIsRefused) {
  for (const std::string text :
       {"", "hello\n", "bps-scheduler: run ", "bps-scheduler: run 0\n", "bps-scheduler: run 12x\n"}) {
    std::ofstream(path_) << text;
    EXPECT_THROW(run_from_state(path_), Error) << text;
  }
  EXPECT_THROW(run_from_state(folder_.string()), Error);
  EXPECT_THROW(run_from_state((folder_ / "missing" / "state").string()), Error);
}

}  // namespace
}  // namespace bps::van
