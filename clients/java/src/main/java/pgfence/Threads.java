package pgfence;

import java.lang.System.Logger.Level;
import java.sql.*;
import java.util.concurrent.*;
import java.util.stream.Stream;
import org.postgresql.core.BaseConnection;

/** Calls in threads of their own, which no interrupt of a caller reaches. They end a second after their last call. */
final class Threads {
    private static final System.Logger LOG = System.getLogger("pgfence");
    static final ThreadPoolExecutor POOL = new ThreadPoolExecutor(0, Integer.MAX_VALUE, 1, TimeUnit.SECONDS,
            new SynchronousQueue<>(), work -> {
                Thread thread = new Thread(work, "pg_fence");
                thread.setDaemon(true);
                return thread;
            });

    static CompletableFuture<Void> run(Holding.Step<Exception> task) {
        return start(() -> {
            task.run();
            return null;
        });
    }

    static <T> CompletableFuture<T> start(Callable<T> call) {
        try {
            return CompletableFuture.supplyAsync(() -> {
                try {
                    return call.call();
                } catch (Exception error) {
                    throw as(error);
                }
            }, POOL);
        } catch (OutOfMemoryError error) {
            String told = "a thread cannot be started: " + error.getMessage();
            return CompletableFuture.failedFuture(new FenceException(told, false, error));
        }
    }

    /** Throws what another thread has thrown, with the way to it, and with the way to here. */
    static RuntimeException thrown(Throwable error) {
        Stream<StackTraceElement> here = Stream.of(new Throwable().getStackTrace()).skip(1);
        error.setStackTrace(Stream.concat(Stream.of(error.getStackTrace()), here).toArray(StackTraceElement[]::new));
        return as(error);
    }

    /** Throws what the compiler does not expect here, and does at the caller's. */
    @SuppressWarnings("unchecked")
    static <E extends Throwable> RuntimeException as(Throwable error) throws E { throw (E) error; }

    /** Shuts its socket, whatever hangs on it; and with TLS to shut it may hang as well. */
    static void breakOff(Connection connection) {
        if (connection != null) { run(() -> abort(connection)).exceptionally(Threads::warn); }
    }

    private static void abort(Connection connection) throws SQLException {
        try {
            connection.abort(Runnable::run);
        } catch (SQLException | RuntimeException | LinkageError refused) {
            // Drivers before 42.7 ask the security manager, which Java 24 and newer have none of.
            connection.unwrap(BaseConnection.class).getQueryExecutor().abort();
        }
        // Newer drivers keep a thread until then, and a pool counts the connection as its own.
        connection.close();
    }

    private static Void warn(Throwable error) {
        LOG.log(Level.WARNING, "a connection cannot be broken off: {0}", error.toString());
        return null;
    }

    /** Or not, where that takes too long. */
    static void close(Connection connection) {
        try {
            if (connection != null) { run(connection::close).get(1, TimeUnit.SECONDS); }
        } catch (ExecutionException | InterruptedException | TimeoutException goneAlready) {
            // As it should be.
        }
    }
}
