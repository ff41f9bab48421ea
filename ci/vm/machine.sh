# SPDX-License-Identifier: Apache-2.0
# What the first process of a user-mode kernel makes of a bare root file system, which is this machine's. Sourced by
# the guests of the VM (ci/vm) and of the lab (ci/lab). Ends with standard output and error on the console.
# shellcheck shell=bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 HOME=/root

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /run
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin
ln -s fd/1 /dev/stdout
ln -s fd/2 /dev/stderr
exec < /dev/tty0 > /dev/tty0 2>&1

# A /tmp of its own, for sockets and files that nobody outside shall see; but the named folders stay visible.
own_tmp() {  # ro|rw FOLDER...
  mount -t tmpfs tmpfs /tmp
  local kept
  for kept in "${@:2}"; do
    case "$kept/" in
      /tmp/*) mkdir -p "$kept" && mount -t hostfs hostfs "$kept" -o "$1,$kept" ;;
    esac
  done
}

# The machine's name, and the lines of its /etc/hosts besides those of localhost.
name_machine() {  # NAME "ADDRESS NAME"...
  hostname "$1"
  printf '%s\n' '127.0.0.1 localhost' '::1 localhost' "${@:2}" > /run/hosts
  mount --bind /run/hosts /etc/hosts
}

# Returns when the host has read all that was written to the console. The kernel keeps up to 4 KiB for a reader that is
# slow, and loses them when it switches off.
drain_console() {
  stty echo < /dev/tty0  # a change of settings waits for the output that came before it
}

# perftest divides by the clock rate, which this kernel's cpuinfo lacks. Any will do.
{ cat /proc/cpuinfo; echo "cpu MHz : 2000.000"; } > /run/cpuinfo
mount --bind /run/cpuinfo /proc/cpuinfo
ulimit -l unlimited
ulimit -n 65536
ip link set lo up
