# SPDX-License-Identifier: Apache-2.0
# -DCMAKE_UNITY_BUILD=ON compiles the files of a folder as one, and reads headers and instantiates templates once for it:
# 40 % of the time without optimisation, 70 % with -O3. So names without linkage are unique within a folder.
function(bps_group_by_folder target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(source ${sources})
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(GET folder FILENAME folder)
    if(folder MATCHES "^(local|fault|shm|tcp)$") # small ones, and what they include is mostly the same
      set(folder transport)
    endif()
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder})
  endforeach()
endfunction()

# The standard library is then also read once for all folders, together with further headers that are named. A file with
# flags of its own cannot use what has been read with others. File by file nothing is precompiled, so that each file is known to include what it needs.
function(bps_precompile_headers target)
  if(NOT CMAKE_UNITY_BUILD)
    return()
  endif()
  target_precompile_headers(${target} PRIVATE ${PROJECT_SOURCE_DIR}/csrc/precompiled.h ${ARGN})
  get_target_property(sources ${target} SOURCES)
  foreach(source ${sources})
    get_source_file_property(flags ${source} COMPILE_OPTIONS)
    if(flags)
      set_source_files_properties(${source} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    endif()
  endforeach()
endfunction()
