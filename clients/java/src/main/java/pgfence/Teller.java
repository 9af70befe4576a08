package pgfence;

import java.lang.System.Logger.Level;
import java.util.ArrayDeque;
import java.util.Queue;

/** Calls what its user wants called, one after the other, on a thread of its own while there is something to tell. */
final class Teller {
    private final Queue<Runnable> calls = new ArrayDeque<>();
    private boolean isTelling;

    synchronized void tell(Runnable call) {
        calls.add(call);
        if (!isTelling) {
            isTelling = true;
            Sql.daemon("pg_fence tells", this::run).start();
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
        isTelling = !calls.isEmpty();
        return calls.poll();
    }
}
