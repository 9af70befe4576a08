#!/bin/bash
# femtoqueue 0.4.2 (PyPI, task queue in a folder): a task that waited in the queue is given to two nodes.
#
# Guess: a task is given to another node if its own node has had it in progress for longer than timeout_stale_ms.
# Seen: the time counts from push(), which is in the file's name, not from pop(). A task that waited longer than that
#   is stale as soon as it is taken, and the next node that looks takes it too; then the first one's done() raises. By
#   default, a backlog of half a minute is enough.
. "$(dirname "$0")/lib.sh"
pip_install femtoqueue==0.4.2
cd "$work"
python > "$work/seen" <<'END' || true
import time
from femtoqueue import FemtoQueue
for waited in 0, 3:
    nodes = [FemtoQueue(f"waited-{waited}", node_id=name, timeout_stale_ms=2000) for name in ("first", "second")]
    nodes[0].push(b"report")
    time.sleep(waited)
    for node in nodes:
        print(f"after {waited} s in the queue, {node.node_id} node gets:", getattr(node.pop(), "data", None))
END
still <<'END'
after 0 s in the queue, first node gets: b'report'
after 0 s in the queue, second node gets: None
after 3 s in the queue, first node gets: b'report'
after 3 s in the queue, second node gets: b'report'
END
