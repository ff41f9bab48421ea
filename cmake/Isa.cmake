# The reducer has one file per instruction set, csrc/server/reduce_<isa>.cc; each is compiled with the flags of its
# set and chosen at run time. Files of other architectures compile to nothing (they are guarded by the flags).
function(bps_set_isa_flags)
  # A precompiled header is for one set of flags, and would bring in code that others call.
  file(GLOB kernels csrc/server/reduce_*.cc)
  set_source_files_properties(${kernels} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  if(BPS_SANITIZE)  # they see many megabytes in the tests
    set_property(SOURCE ${kernels} APPEND PROPERTY COMPILE_OPTIONS -O1)
  endif()
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set_property(SOURCE csrc/server/reduce_avx2.cc APPEND PROPERTY COMPILE_OPTIONS -mavx2 -mf16c -mfma)
    set_property(
      SOURCE csrc/server/reduce_avx512.cc
      APPEND
      PROPERTY COMPILE_OPTIONS -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mf16c)
  endif()
endfunction()
