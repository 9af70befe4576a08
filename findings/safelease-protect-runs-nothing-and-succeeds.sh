#!/bin/bash
# safelease 1.0.1 (Debian 12, leases on a shared disk): "safelease protect … program" runs no program, and exits 0.
#
# Guess: of five operations in its usage "protect <path> <lease_ms> <op_max_ms> <progname>" takes the lease, runs the
#   program under it, and ends with its status; if another host has the lease it waits or fails, as acquire does.
# Seen: nothing is run and no lease is taken, whether the lease is free or held, there is not a word, and the status is
#   0. So a nightly job under it has succeeded every night and never run. What is not in the usage is refused.
. "$(dirname "$0")/lib.sh"
apt_unpack safelease=1.0.1-1
cd "$work"
truncate -s 1M lease
printf '#!/bin/sh\necho "the job runs"\nexit 3\n' > job
chmod +x job
protect() {
  local status=0
  safelease protect lease 5000 1000 "$work/job" > said 2>&1 || status=$?
  echo "protect: $(cat said)status $status"
}
{
  echo "the lease is free"
  protect
  "$work/job" || echo "without protect: status $?"
  safelease acquire lease host-a 5000 1000 > stamp && echo "host-a has acquired it"
  protect
  safelease guard lease 5000 1000 "$work/job" > said 2>&1 || echo "guard: status $?, $(head -1 said)"
} > seen 2>&1
still <<'END'
the lease is free
protect: status 0
the job runs
without protect: status 3
host-a has acquired it
protect: status 0
guard: status 1, unknonwn op <guard>
END
