#!/bin/bash
# throttle-client 0.5.13 with throttle-server 0.4.1 (PyPI, semaphores over HTTP): a wait that timed out ends the
# heartbeat of the lock that is held.
#
# Guess: within "with lock(url, 'reports')" a heartbeat keeps the lease alive. If one more lock is tried there and not
#   had in time, that raises Timeout, and nothing changes for the outer one.
# Seen: the wait stops the heartbeat, which it replaces by its own calls, and only a lock that was granted starts it
#   again. After the Timeout nobody renews the outer lock: its lease runs out with its holder at work, and the next one
#   is let in. The block ends without an error.
. "$(dirname "$0")/lib.sh"
pip_install throttle-client==0.5.13 throttle-server==0.4.1 requests==2.32.3 tenacity==9.1.2
cd "$work"
port=$(free_ports 1)
printf '%s\n' 'litter_collection_interval = "100ms"' '[semaphores]' 'reports = { max = 1, level = 2 }' \
  'printer = { max = 1, level = 1 }' > throttle.toml
python/bin/throttle --address 127.0.0.1 --port "$port" --configuration throttle.toml > server.log 2>&1 &
wait_for_port "$port"
python "$port" > seen <<'END' || true
import sys, threading, time
from datetime import timedelta
from throttle_client import PeerWithHeartbeat, Timeout, lock, set_local_peer
from throttle_client.client import Client
url = f"http://127.0.0.1:{sys.argv[1]}"
def seconds(n): return timedelta(seconds=n)
def expire_soon():
    set_local_peer(url, PeerWithHeartbeat(Client(url), expiration_time=seconds(2), heartbeat_interval=seconds(0.5)))
def another(wait):
    expire_soon()
    try:
        with lock(url, "reports", timeout=seconds(wait)): print("  another one has the reports")
    except Timeout: print("  another one times out for the reports")
def in_a_thread(work, *args):
    thread = threading.Thread(target=work, args=args)
    thread.start()
    return thread
def have_the_printer(until):
    with lock(url, "printer"): until.wait()
def job(tries_the_printer):
    expire_soon()
    with lock(url, "reports"):
        print("a job has the reports")
        if tries_the_printer:
            try:
                with lock(url, "printer", timeout=seconds(0.5)): print("  it has the printer")
            except Timeout: print("  it times out for the printer")
        in_a_thread(another, 6).join()
    print("  the job ends")
job(False)
over = threading.Event()
printing = in_a_thread(have_the_printer, over)
time.sleep(1)
job(True)
over.set()
printing.join()
END
still <<'END'
a job has the reports
  another one times out for the reports
  the job ends
a job has the reports
  it times out for the printer
  another one has the reports
  the job ends
END
