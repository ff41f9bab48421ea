# What the kernel's source needs, applied to arch/x86/um/user-offsets.c: the kernel saves a process's floating-point
# registers in a buffer whose size is a constant of 2,696 bytes. Processors with AMX have 11 KB of them, so that the
# first process dies there ("ptrace set fp regs failed, errno = 14"). A buffer that is too large is harmless: the host
# fills what it has.
s/DEFINE_LONGS(HOST_FP_SIZE, 2696)/DEFINE_LONGS(HOST_FP_SIZE, 12288)/
