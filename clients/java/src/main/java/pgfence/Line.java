package pgfence;

import java.sql.*;
import java.util.List;
import java.util.concurrent.*;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.*;
import org.postgresql.PGConnection;

/**
 * A connection of the fence's own: opened when it is needed, for one call at a time. Each call is in a thread of its own,
 * and is left behind when it takes too long, whether the driver notices that its socket was shut or not.
 */
final class Line {
    /** The result of a call, and its connection. */
    record Rows(List<Object[]> list, int session) {}

    /** How long it may take to open one while leases wait for it, and while none does; and how long an idle one is trusted. */
    private static final double TO_OPEN = 2, FIRST = 10, FRESH = 0.02;

    private final Callable<Connection> source;
    private final BooleanSupplier isAwaited;
    /** Of all calls; and of those that acquire, one of which at a time is among the others. */
    private final ReentrantLock turn = new ReentrantLock(true), calm = new ReentrantLock(true);
    private Connection connection;
    private double usedAt;
    /** Which connection it is: another number after each. */
    volatile int session;

    Line(Callable<Connection> source, BooleanSupplier isAwaited) {
        this.source = source;
        this.isAwaited = isAwaited;
    }

    /** As {@code rows}, behind all that keeps or releases, unless nobody waits for it any more when its turn has come. */
    Rows calmly(Sql.Call call, double limit, BooleanSupplier isGivenUp) throws SQLException {
        while (true) {
            calm.lock();
            try {
                if (isGivenUp.getAsBoolean()) {
                    throw new FenceException("the fence is closed, or nobody waits for the lease any more", false, null);
                }
                return rows(call, limit);
            } catch (SQLException error) {
                // The role's transactions are SERIALIZABLE.
                if (!FenceException.stateOf(error).equals("40001")) { throw error; }
            } finally {
                calm.unlock();
            }
        }
    }

    /** A statement in autocommit, which may take so many seconds beside opening the connection. */
    Rows rows(Sql.Call call, double limit) throws SQLException {
        turn.lock();
        try {
            Connection old = connection;
            if (old != null && Clock.now() > usedAt + FRESH && within(limit, () -> hasEnded(old), tooLate -> {})) {
                Threads.close(detach());
            }
            if (connection == null) {
                take(within(isAwaited.getAsBoolean() ? Math.max(TO_OPEN, limit) : FIRST, this::opened, Threads::close));
            }
            Connection on = connection;
            List<Object[]> rows = within(limit, () -> Sql.rows(on, call, true), tooLate -> {});
            usedAt = Clock.now();
            return new Rows(rows, session);
        } finally {
            turn.unlock();
        }
    }

    /** The result of a call that comes in time; one that comes later is for {@code late}. */
    private <T> T within(double limit, Callable<T> call, Consumer<T> late) throws SQLException {
        CompletableFuture<T> answer = Threads.start(call);
        try {
            return answer.get((long) (limit * 1e9), TimeUnit.NANOSECONDS);
        } catch (TimeoutException | InterruptedException tooLate) {
            answer.thenAccept(late);
            Threads.breakOff(detach());
            throw new FenceException("the server has not answered within %.1f s".formatted(limit), false, null);
        } catch (ExecutionException failed) {
            Throwable told = FenceException.ofCall(failed.getCause(), connection);
            if (connection != null && (connection.isClosed() || FenceException.isEnd(told))) { Threads.close(detach()); }
            throw Threads.thrown(told);
        }
    }

    private Connection opened() throws Exception {
        Connection opened = source.call();
        if (opened == null || !opened.isWrapperFor(PGConnection.class)) {
            throw new IllegalArgumentException("a fence takes connections to PostgreSQL, and not " + opened);
        }
        opened.setAutoCommit(true);
        return opened;
    }

    private void take(Connection taken) {
        session += connection == taken ? 0 : 1;
        connection = taken;
    }

    /** The connection that is to be closed. Nobody uses it. */
    Connection detach() {
        Connection detached = connection;
        take(null);
        return detached;
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
}
