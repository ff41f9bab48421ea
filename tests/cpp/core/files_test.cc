// SPDX-License-Identifier: Apache-2.0
#include "core/files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "core/error.h"

namespace bps {
namespace {

constexpr uid_t kNobody = 65534;

class Files : public testing::Test {
 protected:
  Files() { std::filesystem::create_directory(path_); }
  ~Files() override { std::filesystem::remove_all(path_); }

  std::string path(const std::string& name) const { return path_ / name; }
  std::string text(const std::string& name) const {
    std::ostringstream all;
    all << std::ifstream(path(name)).rdbuf();
    return all.str();
  }
  void put(const std::string& name, const std::string& text) const { std::ofstream(path(name)) << text; }
  std::size_t entries() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }
  Fd folder() const { return open_folder(path_); }
  // What an Error says that this throws; "" where it throws none.
  template <typename What>
  static std::string refusal(What&& what) {
    try {
      what();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  const std::filesystem::path path_ =
      std::filesystem::temp_directory_path() / ("bps-files-" + std::to_string(::getpid()));
};

TEST(SplitPath, HasAFolderAlways) {
  for (const auto& [path, folder, name] : {std::array{"a/b/c", "a/b", "c"}, std::array{"/c", "/", "c"},
                                           std::array{"c", ".", "c"}, std::array{"a/", "a", ""}}) {
    EXPECT_EQ(split_path(path).folder, folder) << path;
    EXPECT_EQ(split_path(path).name, name) << path;
  }
}

TEST_F(Files, ANewFileHasItsNameWhenItIsWhole) {
  const Fd folder = this->folder();
  {
    NewFile file(folder.get(), split_path(path("a")), 0600);
    file.write("some");
    EXPECT_FALSE(std::filesystem::exists(path("a")));
    file.write(" text");
    file.replace();
  }
  EXPECT_EQ(text("a"), "some text");
  {
    NewFile file(folder.get(), split_path(path("b")), 0600);
    file.write("not all of it");
  }
  EXPECT_EQ(entries(), 1U);
}

TEST_F(Files, ANewFileTakesThePlaceOfWhatIsThereAndNothingElse) {
  put("precious", "precious");
  put("file", "old");
  ASSERT_EQ(::chmod(path("file").c_str(), 0666), 0);
  std::filesystem::create_symlink(path("precious"), path("link"));
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0666), 0);
  const Fd folder = this->folder();
  for (const char* name : {"file", "link", "fifo"}) {
    NewFile file(folder.get(), split_path(path(name)), 0600);
    file.write("new");
    file.replace();
    struct stat found{};
    ASSERT_EQ(::lstat(path(name).c_str(), &found), 0);
    EXPECT_EQ(found.st_mode, S_IFREG | 0600U) << name;
    EXPECT_EQ(text(name), "new");
  }
  EXPECT_EQ(text("precious"), "precious");
  std::filesystem::create_directory(path("folder"));
  NewFile file(folder.get(), split_path(path("folder")), 0600);
  EXPECT_NE(refusal([&] { file.replace(); }).find("cannot write " + path("folder")), std::string::npos);
}

TEST_F(Files, TheFirstFileIsKept) {
  const Fd folder = this->folder();
  for (const char* text : {"first", "second"}) {
    NewFile file(folder.get(), split_path(path("a")), 0600);
    file.write(text);
    EXPECT_EQ(file.keep_if_first(), text == std::string("first"));
  }
  EXPECT_EQ(text("a"), "first");
  EXPECT_EQ(entries(), 1U);
}

TEST_F(Files, OnlyARegularFileIsOpened) {
  put("file", "text");
  std::filesystem::create_symlink(path("file"), path("link"));
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0666), 0);
  const Fd folder = this->folder();
  EXPECT_EQ(open_regular(folder.get(), "file", path("file")).status.st_size, 4);
  EXPECT_EQ(open_named(path("link")).status.st_size, 4);
  EXPECT_EQ(refusal([&] { open_regular(folder.get(), "link", path("link")); }), path("link") + " is a symbolic link");
  EXPECT_EQ(refusal([&] { open_regular(folder.get(), "fifo", "F"); }), "F is not a regular file");
  EXPECT_EQ(refusal([&] { open_named(path("fifo")); }), path("fifo") + " is not a regular file");
  EXPECT_EQ(refusal([&] { open_named(path_); }), path_.string() + " is not a regular file");
  EXPECT_FALSE(open_regular(folder.get(), "none", path("none")).file);
  EXPECT_EQ(errno, ENOENT);
}

TEST_F(Files, AFolderWhoseNameOthersKnowIsNoLink) {
  EXPECT_TRUE(open_own_folder(path("folder"), 0700));
  EXPECT_TRUE(open_own_folder(path("folder"), 0700)) << "it is there";
  std::filesystem::create_symlink(path("folder"), path("link"));
  put("file", "");
  for (const char* name : {"link", "file"}) {
    EXPECT_EQ(refusal([&] { open_own_folder(path(name), 0700); }), path(name) + " is not a folder, or a link to one");
  }
  EXPECT_TRUE(open_folder(path("link"))) << "this one was named";
  EXPECT_FALSE(open_own_folder(path("none/folder"), 0700));
  EXPECT_EQ(errno, ENOENT);
}

TEST_F(Files, WhatBelongsToAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make files of another user";
  std::filesystem::create_directory(path("folder"));
  ASSERT_EQ(::chown(path("folder").c_str(), kNobody, kNobody), 0);
  EXPECT_NE(refusal([&] { open_own_folder(path("folder"), 0700); }).find("belongs to user 65534, not to user 0"),
            std::string::npos);
  EXPECT_EQ(entries(), 1U) << "what was made to see whose files are ours is gone";
}

}  // namespace
}  // namespace bps
