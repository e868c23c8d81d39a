#!/bin/bash
# Runs in the virtual machine: makes two soft-RoCE cards, an NVMe disk over TCP and a DAX device,
# then runs the tests that need them. `--run COMMAND...` runs a command instead of tests.
set -euo pipefail

say() { echo "vm: $1 after $(cut -d' ' -f1 /proc/uptime) s"; }

# A card per network interface: one RoCE card cannot be reached through the other's.
cards() {
  ip link set lo up
  ip link add dummy0 mtu 4200 type dummy
  ip address add 10.77.0.1/24 dev dummy0
  ip link set dummy0 up
  rdma link add rxe0 type rxe netdev lo
  rdma link add rxe1 type rxe netdev dummy0
}

# A disk of this machine, exported over NVMe/TCP and connected again: /dev/nvme0n1.
disk() {
  local target=/sys/kernel/config/nvmet name=nqn.2026-01.test:disk file=/dev/shm/disk.img
  mount -t configfs none /sys/kernel/config 2>/dev/null || true
  truncate -s 64M "$file"
  mkdir "$target/subsystems/$name"
  echo 1 >"$target/subsystems/$name/attr_allow_any_host"
  mkdir "$target/subsystems/$name/namespaces/1"
  printf %s "$file" >"$target/subsystems/$name/namespaces/1/device_path"
  echo 1 >"$target/subsystems/$name/namespaces/1/buffered_io"
  echo 1 >"$target/subsystems/$name/namespaces/1/enable"
  mkdir "$target/ports/1"
  echo tcp >"$target/ports/1/addr_trtype"
  echo ipv4 >"$target/ports/1/addr_adrfam"
  echo 127.0.0.1 >"$target/ports/1/addr_traddr"
  echo 4420 >"$target/ports/1/addr_trsvcid"
  ln -s "$target/subsystems/$name" "$target/ports/1/subsystems/$name"
  exec 3<>/dev/nvme-fabrics
  printf %s "transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn=$name" >&3
  exec 3>&-
  for _ in $(seq 100); do [ -b /dev/nvme0n1 ] && break; sleep 0.1; done
  [ "$(cat /sys/class/nvme/nvme0/transport)" = tcp ]
}

# Memory that the kernel was told to leave alone (memmap=), as a DAX device: /dev/dax0.0.
dax() {
  ndctl create-namespace --force --reconfig namespace0.0 --mode devdax --align 2M >/dev/null
  [ -c /dev/dax0.0 ]
}

for module in dummy rdma_rxe nvmet-tcp nvme-tcp nd_e820 nd_pmem dax_pmem device_dax; do
  modprobe "$module"
done
cards
disk
dax
say "devices are there"
export MOONCAKE_TEST_BLOCK_DEVICE=/dev/nvme0n1 MOONCAKE_TEST_DAX_DEVICE=/dev/dax0.0

if [ "${1:-}" = --run ]; then
  shift
  exec "$@"
fi
# Everything is named, so that a test that is gone is an error and not a silence.
tests=(
  tests/rdma/test_device.py
  tests/transfer/test_file.py::TestBlockDevice
  tests/transfer/test_file.py::test_a_block_device_is_claimed_and_used_directly
  tests/transfer/test_dax.py::TestDeviceOverShm
  tests/transfer/test_dax.py::test_a_device_keeps_what_was_flushed
  tests/master/test_devices.py::test_a_worker_lends_a_device
)
exec "$PYTHON" -m pytest -p no:cacheprovider -p tests.rdma.strict -n 0 -v --tb=short \
  --durations 10 --timeout 240 -o faulthandler_timeout=230 "${tests[@]}" "$@"
