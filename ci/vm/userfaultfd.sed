# The monitor of the address space (csrc/core/address_monitor.h) registers memory with a userfaultfd for write faults and
# asks for none: it wants the events of the address space only. Kernels allow that where the processor's page tables have
# a bit for it, which user-mode Linux lacks and these registrations never use. Applied to fs/userfaultfd.c.
s/^#ifndef CONFIG_HAVE_ARCH_USERFAULTFD_WP$/#if 0/
