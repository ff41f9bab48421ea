# SPDX-License-Identifier: Apache-2.0
# The reducer has one file per instruction set, csrc/server/reduce_<isa>.cc; each is compiled with the flags of its
# set and chosen at run time. Files of other architectures compile to nothing (they are guarded by the flags).
function(bps_set_isa_flags)
  # Compiled alone: their code must never be what another file calls.
  file(GLOB kernels csrc/server/reduce_*.cc)
  set_source_files_properties(${kernels} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  if(BPS_SANITIZE)  # they see many megabytes in the tests
    set_property(SOURCE ${kernels} APPEND PROPERTY COMPILE_OPTIONS -O1)
  endif()
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    # One list for both: what the compiler may use in a file, and what reduce.cc asks the processor for before it calls
    # that file's code.
    set(avx2 avx2 fma f16c)
    set(avx512 ${avx2} avx512f avx512bw avx512dq avx512vl)
    foreach(isa avx2 avx512)
      list(TRANSFORM ${isa} PREPEND -m OUTPUT_VARIABLE flags)
      set_property(SOURCE csrc/server/reduce_${isa}.cc APPEND PROPERTY COMPILE_OPTIONS ${flags})
      string(TOUPPER ${isa} name)
      string(REPLACE ";" " " features "${${isa}}")
      set_property(SOURCE csrc/server/reduce.cc APPEND PROPERTY COMPILE_DEFINITIONS "BPS_${name}=\"${features}\"")
    endforeach()
  endif()
endfunction()
