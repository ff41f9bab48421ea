// SPDX-License-Identifier: Apache-2.0
// Opens and makes files in folders that other users may write, as /tmp is.
//
// Another user can put something under the name that a process is about to use: a symbolic link to a file of this user,
// a FIFO that holds up the process that opens it, or a file of theirs that they read or change later. So a new file is
// never one that was there. It is made under a random name and gets its own when it is whole. A file or folder that has
// to be there is looked at after it was opened. Opening it follows no link and waits for nobody.
//
// Any thread may call these. They throw kInvalidArgument, with the path, for what somebody has put there. What the
// system refuses is an empty Fd, with errno; NewFile throws kTransport for it.
#pragma once

#include <sys/stat.h>

#include <string>
#include <string_view>

#include "core/fd.h"

namespace bps {

struct FileName {
  std::string folder;  // "." where the path names none
  std::string name;
};
FileName split_path(const std::string& path);

// Throws unless `found`, in this folder, belongs to this user or root. A network file system may give this user's files
// another owner: then that owner's files count as this user's.
void check_owner(int folder, const struct stat& found, const std::string& path);

// Opens a folder that was named to this process. It may be a link, and another user's. Throws kTransport.
Fd open_folder(const std::string& path);
// Opens a folder whose name others know, and makes it, with the given mode, if it is not there. Throws unless it is a
// folder itself, and belongs to this user or root.
Fd open_own_folder(const std::string& path, mode_t mode);

struct OpenedFile {
  Fd file;  // opened for reading
  struct stat status = {};
};
// Throws for a link and for whatever is no regular file. The caller has to check whose it is.
OpenedFile open_regular(int folder, const std::string& name, const std::string& path);
// Does the same for a file that was named to this process: it may be reached by a link.
OpenedFile open_named(const std::string& path);

// Makes a new file, in a folder that outlives the object. The destructor removes it unless it has got its name.
class NewFile {
 public:
  NewFile(int folder, FileName name, mode_t mode);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(std::string_view text);
  void sync();
  std::string path() const { return name_.folder + "/" + name_.name; }
  // Gives the file its name, and replaces whatever has that name.
  void replace();
  // Gives the file its name. Returns false where something has the name already.
  bool keep_if_first();

 private:
  [[noreturn]] void fail() const;  // throws with errno

  const int folder_;
  const FileName name_;
  const std::string part_;
  Fd file_;
};

}  // namespace bps
