#!/bin/bash
# deferjob 0.1.1 (PyPI, delayed jobs in PostgreSQL): a worker without the handler of a job fails it, for good.
#
# Guess: a worker claims what it has a handler for, as it knows their names; or it gives the job back, or uses up one
#   of its five attempts, and the worker that has the handler does it.
# Seen: it claims whatever is due. A job of a name that it does not know is `failed` after one attempt of five: while
#   a deployment rolls, the old workers throw the new jobs away.
. "$(dirname "$0")/lib.sh"
pip_install deferjob==0.1.1 'psycopg[binary]==3.3.9'
postgres
python > "$work/seen" <<'END' || true
import logging, os
from datetime import datetime, timezone
from deferjob import Defer
logging.disable()
old, new = (Defer(os.environ["DATABASE_URL"]) for _ in range(2))
old.install()
old.job("letter")(lambda job: print("the old worker:", job.name))
new.job("letter")(lambda job: print("the new worker:", job.name))
new.job("report")(lambda job: print("the new worker:", job.name))
jobs = [new.schedule(name, run_at=datetime.now(timezone.utc)) for name in ("letter", "report")]
print("the old worker ran", old.run_once())
print("the new worker ran", new.run_once())
for job in jobs:
    job = new.get(id=job.id)
    print(job.name, job.status, "attempt", job.attempts, "of", job.max_attempts, "|", job.last_error)
END
still <<'END'
the old worker: letter
the old worker ran 2
the new worker ran 0
letter done attempt 1 of 5 | None
report failed attempt 1 of 5 | no handler registered for 'report'
END
