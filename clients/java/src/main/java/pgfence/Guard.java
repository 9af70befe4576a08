package pgfence;

import java.sql.*;
import java.util.*;
import org.postgresql.core.*;
import pgfence.Fence.Event;
import pgfence.FenceException.*;

/**
 * A transaction under leases. A connection in autocommit gets one of its own. On any other it is the transaction of the code
 * that has ended the autocommit (Spring, Hibernate, another guard), which is guarded from a savepoint on.
 */
final class Guard {
    /** The token is of this transaction alone: where the work has ended it, and begun another one, none of that is committed. */
    private static final String COMMIT = "SELECT current_setting('pg_fence.token')::bigint; COMMIT";
    /** There is no such savepoint any more; or no token, so that the text is no number. */
    private static final String NO_SAVEPOINT = "3B001", NO_TOKEN = "22P02";

    /** How far it has come, and where it stays when something fails. */
    private enum Stage { BEFORE, BEGUN, WORK, ENDING, COMMITTING }

    private final Keeper keeper;
    private final List<? extends Holding> held;
    /** The same; none where it is adopted. */
    private final List<Lease> leases;
    private final boolean releases;
    private final Connection connection;
    /** The driver's own, whatever a pool has put around it. */
    private final BaseConnection raw;
    private Stage stage;
    private boolean isInner, isStale;

    Guard(Keeper keeper, List<? extends Holding> held, boolean releases, Connection on) throws SQLException {
        if (held.isEmpty()) { throw new IllegalArgumentException("a guard takes at least one lease"); }
        if (on == null || !on.isWrapperFor(BaseConnection.class)) {
            throw new IllegalArgumentException("a guard takes a connection to PostgreSQL, and not " + on);
        }
        this.keeper = keeper;
        this.held = held;
        this.releases = releases;
        leases = held.stream().filter(Lease.class::isInstance).map(Lease.class::cast).toList();
        connection = on;
        raw = on.unwrap(BaseConnection.class);
    }

    <E extends Exception> void around(Holding.Step<E> step) throws E, SQLException {
        around(() -> {
            step.run();
            return null;
        });
    }

    <T, E extends Exception> T around(Holding.Work<T, E> work) throws E, SQLException {
        try {
            return once(work);
        } catch (Refused refused) {
            boolean isOfBegin = stage == Stage.BEGUN && !isInner && !leases.isEmpty();
            if (!isOfBegin || !refused.sqlState().equals("PF004")) { throw refused; }
            // After a failover no token speaks until its holder has renewed.
            Threads.run(() -> keeper.renew(leases)).exceptionally(noThread -> null).join();
            return once(work);
        }
    }

    private <T, E extends Exception> T once(Holding.Work<T, E> work) throws E, SQLException {
        stage = Stage.BEFORE;
        isStale = false;
        keeper.enter(leases, raw);
        try {
            leases.forEach(Lease::check);
            begin();
            stage = Stage.WORK;
            T result = work.run();
            stage = Stage.ENDING;
            if (releases) { keeper.rest(leases, 1); }
            refuseIfFailed();
            release();
            stage = Stage.COMMITTING;
            commit();
            if (releases) { keeper.tell(Event.Kind.RELEASED, keeper.end(leases, Reason.RELEASED)); }
            return result;
        } catch (Throwable error) {
            Throwable told = told(error);
            rollBack();
            throw Threads.as(told);
        } finally {
            if (releases && stage.compareTo(Stage.ENDING) >= 0) { keeper.rest(leases, -1); }
            keeper.leave(leases, raw);
            // The next renewal tells what the server thinks; but the connection is sound.
            if (isStale) { keeper.beatAt(leases, Double.NEGATIVE_INFINITY); }
        }
    }

    private void begin() throws SQLException {
        isInner = !connection.getAutoCommit() || raw.getTransactionState() != TransactionState.IDLE;
        if (isInner) {
            execute("SAVEPOINT pg_fence");
        } else {
            connection.setAutoCommit(false);
        }
        stage = Stage.BEGUN;
        if (connection.getAutoCommit() && !isInner) {
            throw new IllegalArgumentException("the connection stays in autocommit: there is nothing to guard");
        }
        Holding first = held.get(0);
        Sql.rows(connection, leases.isEmpty()
                ? keeper.call(Sql.GUARD_ADOPTED, first.names().get(0), first.names().get(0), first.token(), first.holder)
                : keeper.call(Sql.GUARD, Sql.names(held), Sql.tokens(held)), false);
    }

    /** The work may have swallowed an error: then the commit would roll back, and say nothing. */
    private void refuseIfFailed() throws SQLException {
        if (raw.isClosed()) { throw new SQLException("the connection is closed", "08003"); }
        if (raw.getTransactionState() == TransactionState.FAILED) {
            throw new TransactionLost("a statement of the transaction has failed: all of it is rolled back", false, null);
        }
        if (raw.getTransactionState() == TransactionState.IDLE) { throw new SQLException("there is none", NO_SAVEPOINT); }
    }

    private void release() throws SQLException {
        if (!releases) { return; }
        List<Object[]> answers = Sql.rows(connection, keeper.call(Sql.RELEASE, Sql.names(held), Sql.tokens(held)), false);
        for (Holding gone : Sql.gone(held, answers)) {
            if (gone instanceof Lease lease) {
                keeper.end(List.of(lease), Reason.GONE);
                lease.check();
            }
            throw new LeaseLost(Reason.GONE, gone.names(), false, null);
        }
    }

    private void commit() throws SQLException {
        if (isInner) {
            execute("RELEASE SAVEPOINT pg_fence");
        } else {
            execute(COMMIT);
            connection.setAutoCommit(true);
        }
    }

    /** A connection on which that fails ends. The error that led here is the one to tell. */
    private void rollBack() {
        try {
            if (stage == Stage.BEFORE || raw.isClosed()) { return; }
            if (!isInner) {
                connection.rollback();
                connection.setAutoCommit(true);
            } else if (raw.getTransactionState() != TransactionState.IDLE) {
                execute("ROLLBACK TO SAVEPOINT pg_fence; RELEASE SAVEPOINT pg_fence");
            }
        } catch (SQLException | RuntimeException error) {
            Threads.breakOff(raw);
        }
    }

    private void execute(String sql) throws SQLException {
        try (Statement statement = connection.createStatement()) {
            statement.execute(sql);
        }
    }

    /** The typed error, where it is one. A connection that was broken off because of a loss tells the loss. */
    private Throwable told(Throwable error) throws SQLException {
        String state = FenceException.stateOf(error);
        if (error instanceof FenceException || error instanceof Error) { return error; }
        if (FenceException.isEnd(error) && raw.isClosed()) {
            // The server may have ended an idle transaction before it read the commit.
            boolean inDoubt = stage == Stage.COMMITTING && !state.matches("25P0[34]");
            String lost = "the session ended under the transaction: " + error.getMessage();
            return leases.stream().filter(Lease::isLost).findFirst().<Throwable>map(lease -> lease.loss(inDoubt, error))
                    .orElseGet(() -> new TransactionLost(lost, inDoubt, error));
        }
        isStale = state.equals("PF001") || state.equals("PF004");
        if (stage == Stage.WORK) { return FenceException.ofWork(error); }
        if (state.equals(NO_SAVEPOINT) || stage == Stage.COMMITTING && state.equals(NO_TOKEN)) {
            String ended = "the work has ended the transaction itself: what it did after that was not guarded";
            return new TransactionLost(ended, true, error);
        }
        Throwable told = FenceException.ofCall(error, raw);
        // NULL from lease_adopt: an older number is guarded. PF004 from it: another holder has adopted this number.
        boolean isTaken = stage == Stage.BEGUN && leases.isEmpty() && state.matches("22004|PF004");
        return isTaken && told instanceof Refused refused
                ? new LeaseTaken(held.get(0).names(), refused.holder(), null, error) : told;
    }
}
