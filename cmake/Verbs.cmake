# SPDX-License-Identifier: Apache-2.0
# RDMA needs the headers of verbs and of the connection manager to build, and nothing to link: the libraries are opened
# at run time (csrc/transport/rdma/verbs_dl.cc). Headers that are missing are an error: a build lacks RDMA only where that
# was asked for. The headers of rdma-core are used, and no declarations of our own, because verbs.h is more than
# declarations: its inline functions call through the tables of a provider, whose layout is rdma-core's.
option(BPS_RDMA "Build the RDMA transport" ON)
if(BPS_RDMA STREQUAL "auto") # a build folder of before, when this meant: if there are headers
  set(BPS_RDMA ON CACHE BOOL "Build the RDMA transport" FORCE)
endif()

set(bps_with_rdma OFF)
if(BPS_RDMA)
  # The headers are the same for every architecture, so that a cross build takes the host's.
  find_path(BPS_VERBS_HEADERS infiniband/verbs.h NO_CMAKE_FIND_ROOT_PATH)
  find_path(BPS_RDMACM_HEADERS rdma/rdma_cma.h NO_CMAKE_FIND_ROOT_PATH)
  if(BPS_VERBS_HEADERS AND BPS_RDMACM_HEADERS)
    set(bps_with_rdma ON)
  else()
    message(FATAL_ERROR "error: the RDMA transport needs infiniband/verbs.h and rdma/rdma_cma.h, and they were not found\n"
      "hint: install them: apt-get install libibverbs-dev librdmacm-dev (Debian, Ubuntu), dnf install rdma-core-devel "
      "(Fedora, RHEL); or build without RDMA: -DBPS_RDMA=OFF, with pip SKBUILD_CMAKE_DEFINE=BPS_RDMA=OFF pip install .")
  endif()
else()
  message(STATUS "BPS_RDMA=OFF: this build has no RDMA transport")
endif()

# Of the files in csrc/transport/rdma, these need no header of verbs; absent.cc stands in for the others.
function(bps_choose_rdma_sources sources)
  set(kept ${${sources}})
  if(bps_with_rdma)
    list(FILTER kept EXCLUDE REGEX "transport/rdma/absent\\.cc$")
  else()
    list(FILTER kept EXCLUDE REGEX "transport/rdma/")
    foreach(name absent choose_rails gid hca options private_data self_transfer)
      list(APPEND kept csrc/transport/rdma/${name}.cc)
    endforeach()
  endif()
  set(${sources} ${kept} PARENT_SCOPE)
endfunction()

function(bps_use_verbs target)
  target_link_libraries(${target} PUBLIC ${CMAKE_DL_LIBS})
  if(NOT bps_with_rdma)
    return()
  endif()
  if(CMAKE_CROSSCOMPILING)
    # Only these two folders: the rest of the host's headers would be taken for the target's.
    file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/verbs)
    file(CREATE_LINK ${BPS_VERBS_HEADERS}/infiniband ${CMAKE_BINARY_DIR}/verbs/infiniband SYMBOLIC)
    file(CREATE_LINK ${BPS_RDMACM_HEADERS}/rdma ${CMAKE_BINARY_DIR}/verbs/rdma SYMBOLIC)
    target_include_directories(${target} SYSTEM PUBLIC ${CMAKE_BINARY_DIR}/verbs)
  else()
    target_include_directories(${target} SYSTEM PUBLIC ${BPS_VERBS_HEADERS} ${BPS_RDMACM_HEADERS})
  endif()
  target_compile_definitions(${target} PUBLIC BPS_WITH_RDMA)
endfunction()
