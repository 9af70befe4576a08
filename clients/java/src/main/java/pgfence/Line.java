package pgfence;

import java.sql.*;
import java.util.List;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;
import java.util.function.BooleanSupplier;
import org.postgresql.PGConnection;

/**
 * A connection of the fence's own: opened when it is needed, for one call at a time. Each call is in a thread of its own,
 * and is left behind when it takes too long, whether the driver notices that its socket was shut or not.
 */
final class Line {
    /** What a call has brought, and by which connection. */
    record Rows(List<Object[]> list, int session) {}

    /** How long it may take to open one while leases wait for it, and while none does; and how long an idle one is trusted. */
    private static final double TO_OPEN = 2, FIRST = 10, FRESH = 0.02;

    private final Callable<Connection> source;
    private final BooleanSupplier isAwaited;
    private boolean isBusy;
    private int urgent;
    private Connection connection;
    private volatile double usedAt;
    /** Which connection it is: another number after each. */
    volatile int session;

    Line(Callable<Connection> source, BooleanSupplier isAwaited) {
        this.source = source;
        this.isAwaited = isAwaited;
    }

    /** A statement in autocommit, which may take so many seconds beside opening the connection. What is urgent goes first. */
    Rows rows(Sql.Call call, double limit, boolean isUrgent) throws SQLException {
        begin(isUrgent);
        AtomicReference<Connection> mine = new AtomicReference<>(connection);
        AtomicBoolean isLate = new AtomicBoolean();
        double toOpen = isAwaited.getAsBoolean() ? Math.max(TO_OPEN, limit) : FIRST;
        double patience = connection == null ? limit + toOpen : limit;
        try {
            Future<List<Object[]>> answer = Threads.start(() -> answer(call, mine, isLate));
            List<Object[]> rows = answer.get((long) (patience * 1e9), TimeUnit.NANOSECONDS);
            take(mine.get());
            usedAt = Clock.now();
            return new Rows(rows, session);
        } catch (TimeoutException | InterruptedException late) {
            isLate.set(true);
            take(null);
            if (mine.get() != null) { Threads.breakOff(mine.get()); }
            throw new FenceException("the server has not answered within %.1f s".formatted(patience), null);
        } catch (ExecutionException failed) {
            take(mine.get());
            Throwable told = FenceException.ofCall(failed.getCause(), connection);
            if (connection != null && (connection.isClosed() || FenceException.isEnd(told))) { Threads.close(detach()); }
            throw Threads.thrown(told);
        } finally {
            end();
        }
    }

    /** In the thread of the call. */
    private List<Object[]> answer(Sql.Call call, AtomicReference<Connection> mine, AtomicBoolean isLate) throws Exception {
        Connection on = mine.get();
        if (on == null || Clock.now() > usedAt + FRESH && hasEnded(on)) {
            Threads.close(mine.getAndSet(null));
            on = source.call();
            if (on == null || !on.isWrapperFor(PGConnection.class)) {
                throw new IllegalArgumentException("a fence takes connections to PostgreSQL, and not " + on);
            }
            on.setAutoCommit(true);
            mine.set(on);
        }
        try {
            return isLate.get() ? List.of() : Sql.rows(on, call, true);
        } finally {
            if (isLate.get()) { Threads.close(on); }
        }
    }

    private void take(Connection taken) {
        session += connection == taken ? 0 : 1;
        connection = taken;
    }

    /** What is to be closed. Nobody uses it. */
    Connection detach() {
        Connection detached = connection;
        take(null);
        return detached;
    }

    /** Closes it where the server has ended it, unless it is in use. */
    void look() {
        synchronized (this) {
            if (isBusy || connection == null) { return; }
            isBusy = true;
        }
        Threads.close(hasEnded(connection) ? detach() : null);
        end();
    }

    private static boolean hasEnded(Connection on) {
        try {
            // So the driver reads what the server says at its end, and the end itself.
            on.unwrap(PGConnection.class).getNotifications(1);
            return on.isClosed();
        } catch (SQLException ended) {
            return true;
        }
    }

    private synchronized void begin(boolean isUrgent) {
        try {
            for (urgent += isUrgent ? 1 : 0; isBusy || !isUrgent && urgent > 0; ) { wait(); }
            isBusy = true;
        } catch (InterruptedException nobodyDoes) {
            throw new IllegalStateException(nobodyDoes);
        } finally {
            urgent -= isUrgent ? 1 : 0;
        }
    }

    private synchronized void end() {
        isBusy = false;
        notifyAll();
    }
}
