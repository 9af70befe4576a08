#!/bin/bash
# gigq 0.5.1 (PyPI, job queue in SQLite): a job that waits for one that was cancelled runs once the queue is cleared.
#
# Guess: a job that depends on others runs when all of those have completed, says its page. If one was cancelled, the
#   job waits for ever, or is cancelled, too; and to clear away what is over changes nothing of that.
# Seen: what is counted is the jobs depended on that are there and not completed. clear_completed() removes those that
#   were cancelled as well; then none is left to wait for, and the job runs as if they had succeeded.
. "$(dirname "$0")/lib.sh"
pip_install gigq==0.5.1
cd "$work"
cat > jobs.py <<'END'
def test():
    print("the tests run", flush=True)
def deploy():
    print("the release is deployed", flush=True)
END
PYTHONPATH=$work python > seen <<'END' || true
import logging
from gigq import Job, JobQueue, Worker, Workflow
from jobs import deploy, test
logging.disable()
queue, worker = JobQueue("jobs.db"), Worker("jobs.db")
release = Workflow("release")
tests = release.add_job(Job(name="test", function=test))
deployment = release.add_job(Job(name="deploy", function=deploy), depends_on=[tests])
release.submit_all(queue)
def look(when):
    print(f"{when}: a worker finds work: {worker.process_one()}, the deployment is", queue.get_status(deployment.id)["status"])
print("the tests are cancelled:", queue.cancel(tests.id))
look("after that")
print("cleared:", queue.clear_completed(), "job")
look("after that")
END
still <<'END'
the tests are cancelled: True
after that: a worker finds work: False, the deployment is pending
cleared: 1 job
the release is deployed
after that: a worker finds work: True, the deployment is completed
END
