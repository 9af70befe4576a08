package pgfence;

import java.lang.System.Logger.Level;
import java.util.ArrayDeque;
import java.util.Queue;
import java.util.concurrent.TimeUnit;

/** Calls what its user wants called, one after the other, on a thread of its own while there is something to tell. */
final class Teller {
    private static final long LIMIT = TimeUnit.SECONDS.toNanos(3);

    private final Queue<Runnable> calls = new ArrayDeque<>();
    /** While there is something to tell. */
    private Thread thread;

    synchronized void tell(Runnable call) {
        calls.add(call);
        if (thread == null) {
            thread = Sql.daemon("pg_fence tells", this::run);
            thread.start();
        }
    }

    /** Waits until all is told, for a few seconds at most: what is told may block. */
    synchronized void await() {
        boolean wasInterrupted = false;
        long until = Clock.now() + LIMIT;
        while (thread != null && thread != Thread.currentThread() && Clock.now() < until) {
            try {
                wait(TimeUnit.NANOSECONDS.toMillis(LIMIT));
            } catch (InterruptedException later) {
                wasInterrupted = true;
            }
        }
        if (wasInterrupted) {
            Thread.currentThread().interrupt();
        }
    }

    private void run() {
        for (Runnable call = next(); call != null; call = next()) {
            try {
                call.run();
            } catch (RuntimeException error) {
                Holding.LOG.log(Level.ERROR, "what is told of a lease failed", error);
            }
        }
    }

    private synchronized Runnable next() {
        if (calls.isEmpty()) {
            thread = null;
            notifyAll();
        }
        return calls.poll();
    }
}
