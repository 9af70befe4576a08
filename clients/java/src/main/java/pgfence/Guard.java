package pgfence;

import java.sql.*;
import java.util.List;
import org.postgresql.core.*;
import pgfence.FenceException.*;

/**
 * A transaction under leases. A connection in autocommit gets one of its own. On any other it is the transaction of the code
 * that has ended the autocommit (Spring, Hibernate, another guard), which is guarded from a savepoint on.
 */
final class Guard {
    /** There is no such savepoint any more. */
    private static final String NO_TRANSACTION = "3B001";

    private final Keeper keeper;
    /** None where the lease is adopted. */
    private final List<Lease> leases;
    private final List<Sql.Call> begins;
    /** None where nothing is released; else one for each lease. */
    private final List<Sql.Call> ends;
    private final Connection connection;
    /** The driver's own, whatever a pool has put around it. */
    private final BaseConnection raw;
    private boolean isInner, hasBegun, isCommitting, isStale;

    Guard(Keeper keeper, List<Lease> leases, List<Sql.Call> begins, List<Sql.Call> ends, Connection on) throws SQLException {
        if (on == null || !on.isWrapperFor(BaseConnection.class)) {
            throw new IllegalArgumentException("a guard takes a connection to PostgreSQL, and not " + on);
        }
        this.keeper = keeper;
        this.leases = leases;
        this.begins = begins;
        this.ends = ends;
        connection = on;
        raw = on.unwrap(BaseConnection.class);
    }

    static Guard under(Keeper keeper, List<Lease> leases, boolean releases, Connection on) throws SQLException {
        if (leases.isEmpty()) { throw new IllegalArgumentException("a guard takes at least one lease"); }
        List<Sql.Call> begins = Keeper.pairsOf(leases).stream().sorted(Sql::byBytes)
                .map(pair -> keeper.call(Sql.GUARD, pair.name(), pair.token())).toList();
        List<Sql.Call> ends = leases.stream().map(keeper::release).toList();
        return new Guard(keeper, leases, begins, releases ? ends : List.of(), on);
    }

    <T, E extends Exception> T around(Holding.Work<T, E> work) throws E, SQLException {
        begin();
        T result = null;
        Throwable ofWork = null;
        try {
            result = work.run();
        } catch (Throwable error) {
            ofWork = error;
        }
        List<Lease> releasing = ends.isEmpty() ? List.of() : leases;
        keeper.rest(releasing, 1);
        try {
            if (ofWork != null) { throw ofWork; }
            refuseIfFailed();
            release();
            isCommitting = true;
            commit();
            keeper.tell(Event.Kind.RELEASED, keeper.end(releasing, Reason.RELEASED));
            return result;
        } catch (Throwable error) {
            Throwable told = told(error, error != ofWork);
            rollBack();
            throw Threads.as(told);
        } finally {
            keeper.rest(releasing, -1);
            leave();
        }
    }

    private void begin() throws SQLException {
        for (boolean isFirst = true; ; isFirst = false) {
            keeper.enter(leases, raw);
            try {
                leases.forEach(Lease::check);
                isInner = !connection.getAutoCommit() || raw.getTransactionState() != TransactionState.IDLE;
                if (isInner) {
                    execute("SAVEPOINT pg_fence");
                } else {
                    connection.setAutoCommit(false);
                }
                hasBegun = true;
                if (connection.getAutoCommit() && !isInner) {
                    throw new IllegalArgumentException("the connection stays in autocommit: there is nothing to guard");
                }
                for (Sql.Call call : begins) { Sql.rows(connection, call, false); }
                return;
            } catch (Throwable error) {
                Throwable told = told(error, true);
                rollBack();
                leave();
                if (!isFirst || isInner || leases.isEmpty() || !FenceException.stateOf(error).equals("PF004")) {
                    throw Threads.as(told);
                }
                // After a failover no token speaks until its holder has renewed.
                Threads.run(() -> keeper.keep(leases)).exceptionally(noThread -> null).join();
            }
        }
    }

    /** Where the server has doubts, the next renewal tells; but the connection is sound. */
    private void leave() {
        keeper.leave(leases, raw);
        if (isStale) { keeper.beatAt(leases, Double.NEGATIVE_INFINITY); }
    }

    /** The work may have swallowed an error: then the commit would roll back, and say nothing. */
    private void refuseIfFailed() throws SQLException {
        if (raw.isClosed()) { throw new SQLException("the connection is closed", "08003"); }
        if (raw.getTransactionState() == TransactionState.FAILED) {
            throw new TransactionLost("a statement of the transaction has failed: all of it is rolled back", false, null);
        }
        if (raw.getTransactionState() == TransactionState.IDLE) { throw new SQLException("there is none", NO_TRANSACTION); }
    }

    private void release() throws SQLException {
        for (int number = 0; number < ends.size(); number++) {
            Sql.Call end = ends.get(number);
            if (Sql.rows(connection, end, false).get(0)[0] == null) {
                if (leases.isEmpty()) { throw new LeaseLost(Reason.GONE, List.of((String) end.arguments()[0]), false, null); }
                keeper.end(leases.subList(number, number + 1), Reason.GONE);
                throw leases.get(number).loss(false, null);
            }
        }
    }

    private void commit() throws SQLException {
        if (isInner) {
            execute("RELEASE SAVEPOINT pg_fence");
        } else {
            connection.commit();
            connection.setAutoCommit(true);
        }
    }

    /** A connection on which that fails ends. The error that led here is the one to tell. */
    private void rollBack() {
        try {
            if (hasBegun && !raw.isClosed() && !isInner) {
                connection.rollback();
                connection.setAutoCommit(true);
            } else if (hasBegun && !raw.isClosed() && raw.getTransactionState() != TransactionState.IDLE) {
                execute("ROLLBACK TO SAVEPOINT pg_fence; RELEASE SAVEPOINT pg_fence");
            }
        } catch (SQLException | RuntimeException error) {
            Threads.breakOff(raw);
        }
        hasBegun = false;
    }

    private void execute(String sql) throws SQLException {
        try (Statement statement = connection.createStatement()) {
            statement.execute(sql);
        }
    }

    /** The typed error, where it is one. A connection that was broken off because of a loss tells the loss. */
    private Throwable told(Throwable error, boolean isOurs) throws SQLException {
        String state = FenceException.stateOf(error);
        if (error instanceof FenceException || error instanceof Error) { return error; }
        if (FenceException.isEnd(error) && raw.isClosed()) {
            // The server may have ended an idle transaction before it read the commit.
            boolean inDoubt = isCommitting && !state.matches("25P0[34]");
            String lost = "the session ended under the transaction: " + error.getMessage();
            return leases.stream().filter(Lease::isLost).findFirst().<Throwable>map(lease -> lease.loss(inDoubt, error))
                    .orElseGet(() -> new TransactionLost(lost, inDoubt, error));
        }
        isStale = state.equals("PF001") || state.equals("PF004");
        if (isOurs && state.equals(NO_TRANSACTION)) {
            String ended = "the work has ended the transaction itself: what it did after that was not guarded";
            return new TransactionLost(ended, true, error);
        }
        if (isOurs && leases.isEmpty() && state.equals("22004")) {
            // NULL from lease_adopt: an older number is guarded.
            return new LeaseTaken(List.of((String) begins.get(0).arguments()[0]), null, null, error);
        }
        return isOurs ? FenceException.ofCall(error, raw) : FenceException.ofWork(error);
    }
}
