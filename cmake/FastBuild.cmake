# SPDX-License-Identifier: Apache-2.0
# Most of the compiler's time goes into headers that file after file includes. BPS_PRECOMPILE has those of the standard
# library and of pybind11 read once, and compiles the files of folders without a data path (node, van, python) several at
# a time. It is on where the package is built by pip, and off where a launcher such as ccache keeps compiled files, which
# are of no use to it then, and by default, so that a file that lacks an include does not build.
set(fast OFF)
if(SKBUILD AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(fast ON)
endif()
option(BPS_PRECOMPILE "Read headers once for many files" ${fast})

# Files of one group are one for the compiler. Some groups for each folder, so that several processors have something to
# do.
function(bps_group_sources folder size)
  file(GLOB files CONFIGURE_DEPENDS csrc/${folder}/*.cc)
  set(position 0)
  foreach(file ${files})
    math(EXPR group "${position} / ${size}")
    math(EXPR position "${position} + 1")
    set_source_files_properties(${file} PROPERTIES UNITY_GROUP ${folder}_${group})
  endforeach()
endfunction()

# Further arguments: headers beside those of the standard library.
function(bps_build_fast target)
  if(BPS_PRECOMPILE)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    target_precompile_headers(${target} PRIVATE <algorithm> <array> <atomic> <chrono> <condition_variable> <deque> <functional>
      <map> <memory> <mutex> <optional> <span> <string> <string_view> <thread> <unordered_map> <utility> <variant> <vector> ${ARGN})
  endif()
endfunction()
